from __future__ import annotations

import logging
import math
import re
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedclade import ConfigError, UpdateError
from fedclade.channel import encoding as encoding_module
from fedclade.channel.encoding import (
    BLOCK,
    DENSE_ENCODINGS,
    ENCODINGS,
    PIECE,
    SPARSITY,
    ErrorFeedback,
    decode,
    encode,
    encoded_bytes,
)


def drawn(seed: int, size: int, magnitude: float = 1.0) -> torch.Tensor:
    """Entries of many magnitudes, as the layers of a model have them."""
    draw = torch.Generator().manual_seed(seed)
    return (
        magnitude
        * torch.randn(size, generator=draw)
        * 10 ** (4 * torch.rand(size, generator=draw) - 3)
    )


def there_and_back(
    vector: torch.Tensor, encoding: str, n_parameters: int | None = None
) -> torch.Tensor:
    n_parameters = len(vector) if n_parameters is None else n_parameters
    return decode(encode(vector, encoding, n_parameters), len(vector), encoding, n_parameters)


seeds = st.integers(0, 2**31)
sizes = st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
magnitudes = st.sampled_from([1e-40, 1e-30, 1e-8, 1.0, 1e5, 1e18, 1e33])


@given(seeds, sizes)
def test_float32_is_the_vector_to_the_last_bit(seed, size):
    vector = drawn(seed, size)
    assert torch.equal(there_and_back(vector, "float32"), vector)
    assert encode(vector, "float32", size) == struct.pack(f"<{size}f", *vector.tolist())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_update_in_the_memory_of_its_bytes_is_the_same(encoding):
    data = encode(drawn(3, 300), encoding, 290)
    update = decode(data, 300, encoding, 290, copies=False)
    assert torch.equal(update, decode(data, 300, encoding, 290))


def test_only_a_copy_may_be_changed(recwarn):
    data = encode(torch.ones(3), "float32", 3)
    decode(data, 3, "float32", 3).zero_()
    assert decode(data, 3, "float32", 3, copies=False).tolist() == [1.0] * 3
    assert not recwarn.list


@given(seeds, sizes, magnitudes)
def test_an_entry_is_off_by_no_more_than_stated(seed, size, magnitude):
    """int8: half a scale, 1/254 of the block's largest; float16: 2^-11 of the entry, or 2^-40 of the largest.

    Float32 itself rounds thrice (scale, quotient, product), by 2^-24 of an entry each, and by 2^-150 below its range.
    """
    vector = drawn(seed, size, magnitude)
    largest = torch.cat(
        [block.abs().max().expand(len(block)) for block in vector.split(BLOCK)]
    ).double()
    exact, rounding = vector.double(), 3 * 2.0**-24 * vector.abs().double() + 2.0**-149
    error = {
        encoding: (there_and_back(vector, encoding).double() - exact).abs()
        for encoding in ("float16", "int8")
    }
    assert (error["int8"] <= largest.clamp_min(127 * 2.0**-126) / 254 + 128 * rounding).all()
    assert (
        error["float16"]
        <= exact.abs() * 2.0**-11 + largest.clamp_min(2.0**-111) * 2.0**-40 + rounding
    ).all()


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_zeros_and_the_largest_and_smallest_numbers_come_back(encoding):
    top, tiny = 3e38, 2.0**-149
    assert torch.equal(there_and_back(torch.zeros(300), encoding), torch.zeros(300))
    assert there_and_back(torch.tensor([top, -top]), encoding).tolist() == pytest.approx(
        [top, -top], rel=1e-6
    )
    assert torch.isfinite(there_and_back(torch.tensor([tiny, top / 2]), encoding)).all()


def test_int8_bytes_are_as_described():
    """One block: the scale is 254/127 = 2; of halves the even is taken: 3/2 and 5/2 both become 2, 1/2 becomes 0."""
    vector = torch.tensor([254.0, -254.0, 3.0, 5.0, 1.0, -4.0])
    assert encode(vector, "int8", 6) == struct.pack("<f6b", 2.0, 127, -127, 2, 2, 0, -2)


def test_float16_bytes_are_as_described():
    """The scale is 2^16/2^15 = 2; 70000, beyond float16's range of 65504, would be infinite by itself."""
    vector = torch.tensor([2.0**16, -3.0, 1.0])
    assert encode(vector, "float16", 3) == struct.pack("<f3e", 2.0, 2.0**15, -1.5, 0.5)
    assert there_and_back(torch.tensor([70000.0]), "float16").item() == pytest.approx(
        70000, rel=1e-6
    )


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_buffers_travel_as_they_are_and_spoil_no_parameter(encoding):
    parameters, buffers = drawn(0, 300), torch.tensor([1e6, 1e-6, 123456.789])
    whole = there_and_back(torch.cat([parameters, buffers]), encoding, 300)
    assert torch.equal(whole[300:], buffers)
    assert torch.equal(whole[:300], there_and_back(parameters, encoding))


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("float32", 4 * 603),
        ("float16", 4 * 3 + 2 * 600 + 12),
        ("int8", 4 * 3 + 600 + 12),
        ("topk", 8 * 600 // SPARSITY + 12),
    ],
)
def test_the_length_is_known_beforehand(encoding, expected):
    """600 parameters are three blocks; 3 buffers."""
    assert (
        encoded_bytes(603, encoding, 600) == expected == len(encode(torch.ones(603), encoding, 600))
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_another_length_is_refused_with_both_numbers(encoding, change):
    data = encode(torch.ones(300), encoding, 290)
    got = (data + b"\0")[: len(data) + change] if change > -1000 else b""
    told = (
        f"the update has {len(got)} bytes, expected {len(data)} bytes in the encoding "
        f"'{encoding}' for 300 entries, of which 290 are parameters"
    )
    with pytest.raises(UpdateError, match=told):
        decode(got, 300, encoding, 290)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [5, 299])
def test_what_is_not_finite_does_not_become_so(encoding, bad, place):
    """In the parameters (5) and in the buffers (299): so the receiver's check finds it."""
    vector = torch.ones(300)
    vector[place] = bad
    assert not torch.isfinite(there_and_back(vector, encoding, 290)[place])


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_any_bytes_of_the_right_length_decode_to_a_vector(encoding):
    size = encoded_bytes(300, encoding, 290)
    assert decode(b"\xff" * size, 300, encoding, 290).shape == (300,)


@pytest.mark.parametrize(
    "call", [lambda e: encode(torch.ones(2), e, 2), lambda e: ErrorFeedback(e, 2, 2)]
)
def test_an_unknown_encoding_is_named(call):
    with pytest.raises(ConfigError, match="unknown encoding 'int4'; did you mean 'int8'"):
        call("int4")


def test_topk_bytes_are_as_described():
    """The largest 2 of 40 parameters, in the order of their places, and the buffer."""
    vector = torch.zeros(41)
    vector[[30, 7, 12, 40]] = torch.tensor([-3.0, 2.5, 1.0, 9.0])
    assert encode(vector, "topk", 40) == struct.pack("<2I2ff", 7, 30, 2.5, -3.0, 9.0)
    vector[12] = 0
    assert torch.equal(there_and_back(vector, "topk", 40), vector)
    assert there_and_back(torch.ones(3), "topk", 0).tolist() == [1, 1, 1]  # buffers alone


@pytest.mark.parametrize("places", [(7, 7), (30, 7), (7, 40), (7, 2**32 - 1)])
def test_places_that_do_not_increase_or_exist_are_refused(places):
    with pytest.raises(
        UpdateError, match="the places of the 2 parameters in the update should increase and be"
    ):
        decode(struct.pack("<2I2f", *places, 1.0, 2.0), 40, "topk", 40)


# Error feedback


def test_with_feedback_topk_sends_every_entry_in_turn():
    """All entries are equal, so each round sends one twentieth, and each entry waits 20 rounds."""
    update, rounds = torch.ones(200), 3 * SPARSITY
    feedback = ErrorFeedback("topk", 200, 200)
    total = sum(decode(feedback.encode(update), 200, "topk", 200) for _ in range(rounds))
    assert torch.equal(total + feedback.residual, rounds * update)
    assert (feedback.residual < 2 * SPARSITY).all()


@given(seeds, st.sampled_from(ENCODINGS), st.integers(1, 30))
def test_what_was_decoded_is_what_was_meant_but_for_one_residual(seed, encoding, rounds):
    feedback = ErrorFeedback(encoding, 300, 290)
    meant, decoded = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for number in range(rounds):
        update = drawn(seed + number, 300)
        meant += update.double()
        decoded += decode(feedback.encode(update), 300, encoding, 290).double()
    torch.testing.assert_close(
        decoded + feedback.residual.double(), meant, rtol=0, atol=rounds * 1e-5
    )
    if encoding != "topk":  # entries are below 50, and a residual is added to them
        assert (feedback.residual.abs() <= 60 / 254).all()


def test_without_feedback_a_small_entry_is_lost_in_every_round_and_with_it_in_none():
    """Beside a 1, int8 rounds everything below 1/254 to zero."""
    update, rounds = torch.tensor([1.0, 0.003]), 100
    feedback = ErrorFeedback("int8", 2, 2)
    plain = sum(there_and_back(update, "int8") for _ in range(rounds))
    fed = sum(decode(feedback.encode(update), 2, "int8", 2) for _ in range(rounds))
    assert plain[1] == 0
    assert fed[1] == pytest.approx(rounds * 0.003, abs=1 / 127)


def test_a_residual_is_kept_over_a_restart(tmp_path):
    first = ErrorFeedback("int8", 300, 300)
    first.encode(drawn(1, 300))
    first.save(tmp_path / "residual.safetensors")
    again = ErrorFeedback.load(tmp_path / "residual.safetensors", "int8", 300, 300)
    assert torch.count_nonzero(first.residual)
    assert torch.equal(again.residual, first.residual)
    assert again.encode(drawn(2, 300)) == first.encode(drawn(2, 300))
    assert [path.name for path in tmp_path.iterdir()] == ["residual.safetensors"]


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e != "float32"])
def test_a_residual_in_the_memory_of_the_update_is_the_same(encoding):
    own, shared = (ErrorFeedback(encoding, 300, 290) for _ in range(2))
    for number in range(3):
        update = drawn(number, 300)
        update[:20] = -0.0
        expected = own.encode(update.clone())
        assert shared.encode(update, overwrites=True) == expected
        assert shared.residual.data_ptr() == update.data_ptr()
        assert torch.equal(shared.residual, own.residual)


def test_there_is_no_residual_before_the_first_answer(tmp_path, caplog):
    assert not ErrorFeedback.load(tmp_path / "nothing", "int8", 3, 3).residual.any()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("residual", "why"),
    [
        (torch.ones(299), r"it should have shape \(300,\), got \(299,\)"),
        (torch.tensor([math.nan, math.inf] + [0.0] * 298), "2 of 300 entries are not finite"),
    ],
)
def test_a_residual_that_does_not_fit_is_dropped_and_said_to_be(tmp_path, caplog, residual, why):
    save_file({"residual": residual}, tmp_path / "residual")
    feedback = ErrorFeedback.load(tmp_path / "residual", "int8", 300, 300)
    assert not feedback.residual.any()
    assert caplog.records[0].levelno == logging.WARNING
    assert re.search(f"the residual of the last update is dropped: {why}", caplog.text)


@pytest.mark.parametrize("content", [b"", b"half a file", "other"])
def test_a_damaged_file_is_dropped_and_said_to_be(tmp_path, caplog, content):
    if content == "other":
        save_file({"other": torch.ones(3)}, tmp_path / "residual")
    else:
        (tmp_path / "residual").write_bytes(content)
    assert not ErrorFeedback.load(tmp_path / "residual", "int8", 3, 3).residual.any()
    assert f"the residual in {tmp_path / 'residual'} is dropped" in caplog.text


def test_one_update_that_is_not_finite_does_not_spoil_the_next():
    feedback = ErrorFeedback("int8", 3, 3)
    assert not torch.isfinite(
        decode(feedback.encode(torch.tensor([1, math.nan, 1])), 3, "int8", 3)
    ).any()
    assert decode(feedback.encode(torch.tensor([127.0, 1, -1])), 3, "int8", 3).tolist() == [
        127,
        1,
        -1,
    ]


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
@pytest.mark.parametrize("further", [0, 1, BLOCK + 1])
def test_the_pieces_of_a_long_update_are_encoded_as_updates_of_their_own(encoding, further):
    vector = drawn(0, 2 * PIECE + further + 5)  # of which 5 are buffers
    received = there_and_back(vector, encoding, len(vector) - 5)
    pieces = [there_and_back(piece, encoding) for piece in vector[:-5].split(PIECE)]
    assert torch.equal(received, torch.cat([*pieces, vector[-5:]]))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_residual_of_a_long_update_is_all_that_was_lost(encoding):
    vector = drawn(1, PIECE + 3)
    feedback = ErrorFeedback(encoding, len(vector), len(vector))
    feedback.encode(vector)
    assert torch.equal(feedback.residual, vector - there_and_back(vector, encoding))


@pytest.mark.parametrize("encoding", ["float16", "int8", "topk"])
def test_an_encoding_that_fails_leaves_the_residual_as_it_was(
    encoding: str, monkeypatch: pytest.MonkeyPatch
):
    feedback = ErrorFeedback(encoding, 600, 600)
    feedback.encode(drawn(0, 600))
    before = feedback.residual.clone()
    assert before.abs().max() > 0

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    name = (
        "decode" if encoding == "topk" else "tensor_from_bytes"
    )  # the step after the bytes are made
    with monkeypatch.context() as patch:
        patch.setattr(encoding_module, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            feedback.encode(drawn(1, 600))
    assert torch.equal(feedback.residual, before)
    again = ErrorFeedback(encoding, 600, 600)
    again.encode(drawn(0, 600))
    assert feedback.encode(drawn(1, 600)) == again.encode(drawn(1, 600))
