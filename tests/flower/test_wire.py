"""What travels: checked values, raw bytes, and nothing that the server should not know."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedclade
from fedclade.channel.signature import Permutation
from fedclade.core.errors import UpdateError
from fedclade.core.local import LocalTraining
from fedclade.core.params import Layout
from fedclade.flower import LocalGrid, wire
from fedclade.flower.signing import secret_model, seed_of
from fedclade.flower.wire import Content
from tests.flower.grids import CFL_OF_TWO, FOUR, federated, grid_of, hello_to
from tests.tiny import FEATURES, LABELS, federation_of

WORD = st.one_of(
    st.text(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.binary(),
)
WORDS = st.one_of(WORD, st.lists(WORD))
"""What a message can contain."""

SECRET = "0123456789abcdef" * 4


def wide(seed: int = 0) -> nn.Module:
    """Return a model whose permutation is long enough to look for parts of it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(FEATURES, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, LABELS)
        )


class Recording(LocalGrid):
    """A grid that keeps all that passes it: the bytes of every message, and its arrays."""

    @classmethod
    def of(cls, grid: LocalGrid) -> Recording:
        return cls(grid.nodes)

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        for each in (message, reply):
            self.__dict__.setdefault("bytes", []).append(message_to_proto(each).SerializeToString())
            for record in each.content.array_records.values():
                self.__dict__.setdefault("arrays", []).extend(record.values())
        return reply


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """All messages of a run whose clients share a secret."""
    secret = tmp_path_factory.mktemp("client") / "secret"
    secret.write_text(SECRET)
    grid = Recording.of(grid_of(federation_of(FOUR), wide, {"secret-file": str(secret)}))
    federated(grid, CFL_OF_TWO, wide, permute=True, rounds=3)
    assert len(grid.bytes) > 50
    return grid


def appears(data: bytes, messages: Iterable[bytes]) -> bool:
    return any(data in message for message in messages)


def test_the_secret_does_not_travel_nor_what_is_made_of_it(permuted: Recording):
    seed = seed_of(SECRET)
    digest = hashlib.sha256(SECRET.encode())
    for told in (
        SECRET.encode(),
        bytes.fromhex(SECRET),
        digest.digest(),
        digest.hexdigest().encode(),
        seed.to_bytes(32, "little"),
        str(seed).encode(),
    ):
        assert not appears(told, permuted.bytes)


def test_only_that_they_share_one_is_told(permuted: Recording):
    """An HMAC with the secret as its key: who has it can say so, and nobody else learns anything of it."""
    hellos = [hello_to(node) for node in permuted.nodes]
    answers = [Content.of(LocalGrid._answer(permuted, hello).content) for hello in hellos]
    (told,) = {answer.values["secret"] for answer in answers}
    assert len(told) == 64
    assert appears(told.encode(), permuted.bytes)
    assert told not in (hashlib.sha256(SECRET.encode()).hexdigest(), SECRET)


def test_no_part_of_the_permutation_travels(permuted: Recording):
    layout = Layout.of(wide())
    permutation = Permutation(seed_of(SECRET), layout.size, layout.n_parameters)
    assert layout.n_parameters >= 2 * 64
    for order in (permutation._forward, permutation._inverse):
        for kind in (np.int32, np.int64):
            entries = order.numpy().astype(kind)
            for start in range(len(entries) - 63):
                assert not appears(entries[start : start + 64].tobytes(), permuted.bytes)


def test_no_vector_travels_as_it_is(permuted: Recording):
    """Neither the initial model, nor an update: the sorted entries of an array are known, their places are not."""
    layout, seed = Layout.of(wide()), seed_of(SECRET)
    initial = secret_model(wide, layout, seed)
    permutation = Permutation(seed, layout.size, layout.n_parameters)
    assert appears(raw(permutation.apply(initial)), permuted.bytes)  # this is what does
    for model in (initial, layout.flatten(wide(0))):
        parameters = model[: layout.n_parameters]
        for start in range(0, len(parameters) - 8):
            assert not appears(raw(parameters[start : start + 8]), permuted.bytes)
    models = [array for array in permuted.arrays if len(array.data) == 4 * layout.size]
    assert models
    for array in models:
        vector = torch.from_numpy(np.frombuffer(array.data, "<f4").copy())
        in_order = permutation.invert(vector)[: layout.n_parameters]
        runs = [raw(in_order[start : start + 8]) for start in range(0, len(in_order) - 8, 8)]
        # A run of zeros (biases that start there) is the same in any order.
        assert not appears_any([run for run in runs if any(run)], permuted.bytes)


def appears_any(parts: list[bytes], messages: list[bytes]) -> bool:
    return any(appears(part, messages) for part in parts)


def raw(vector: Tensor) -> bytes:
    return vector.numpy().astype("<f4").tobytes()


def test_every_array_is_raw_bytes(permuted: Recording):
    assert {array.stype for array in permuted.arrays} == {"fedclade.raw"}
    layout = Layout.of(wide())
    row_of_gains = 8 * 17
    assert {len(array.data) for array in permuted.arrays} == {4 * layout.size, row_of_gains}


PICKLING = {"pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal"}
WITHIN_RAY = Path(fedclade.__file__).parent / "training" / "remote"
"""What talks to the actors of a user's own Ray cluster, which pickles all that it carries."""
SOURCES = sorted({*Path(fedclade.__file__).parent.rglob("*.py")} - {*WITHIN_RAY.rglob("*.py")})


def test_nothing_is_pickled():
    """No module imports what pickles, and none reads with what may unpickle."""
    assert len(SOURCES) > 100
    for path, node in (
        (source, node) for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))
    ):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not PICKLING & {name.split(".")[0] for name in names}, path
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            assert called not in (
                "torch.load",
                "torch.save",
                "pd.read_pickle",
                "pandas.read_pickle",
            ), path
            pickles = [
                ast.unparse(keyword.value)
                for keyword in node.keywords
                if keyword.arg == "allow_pickle"
            ]
            assert pickles in ([], ["False"]), path


def test_values_are_of_the_kind_that_is_asked_for():
    content = Content({"number": 3, "yes": True, "text": "{}"})
    assert content.get("number", int) == 3
    assert content.get("yes", bool) is True
    assert content.json("text") == {}
    with pytest.raises(UpdateError, match="'yes' should be of type int, got True"):
        content.get("yes", int)
    with pytest.raises(UpdateError, match="'nothing' should be of type str, got None"):
        content.get("nothing", str)


def test_vectors_arrive_as_they_were_sent():
    for dtype in (torch.float32, torch.float64):
        vector = torch.randn(7, dtype=dtype)
        sent = Content.of(wire.record({"a": 1}, {"v": wire.raw_vector(vector)}))
        assert sent.size == 7 * dtype.itemsize
        assert torch.equal(wire.read_vector(sent.vector("v"), (7,), dtype, "it"), vector)
        assert wire.read_vector(sent.vector("v"), (7, 1), dtype, "it").shape == (7, 1)
    with pytest.raises(
        UpdateError, match=r"it has 56 bytes, expected 28 for shape \(7,\) of torch.float32"
    ):
        wire.read_vector(sent.vector("v"), (7,), torch.float32, "it")
    with pytest.raises(UpdateError, match=r"the message has no vector 'w', only \['v'\]"):
        sent.vector("w")


def test_big_endian_hosts_send_little_endian_bytes():
    assert wire.raw_vector(torch.tensor([1.0])).data == b"\x00\x00\x80\x3f"


def test_models_of_other_structures_have_other_digests():
    models = [
        wide(0),
        nn.Sequential(nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 1)),
        wide(0).double(),
    ]
    assert len({wire.layout_digest(Layout.of(model)) for model in models}) == 4
    assert wire.layout_digest(Layout.of(wide(0))) == wire.layout_digest(Layout.of(wide(1)))


def test_models_of_other_frozen_values_have_other_digests():
    """Nobody sends them, so they have to be the same everywhere."""

    def half_frozen(value: float) -> nn.Module:
        module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
        module[0].requires_grad_(False)
        nn.init.constant_(module[0].weight, value)
        nn.init.constant_(module[0].bias, value)
        return module

    models = [half_frozen(0.1), half_frozen(0.2), half_frozen(0.1).requires_grad_(True)]
    assert len({wire.layout_digest(Layout.of(model)) for model in models}) == 3
    assert wire.layout_digest(Layout.of(half_frozen(0.1))) == wire.layout_digest(
        Layout.of(models[0])
    )


def test_a_layout_digest_tells_what_is_personal():
    personal = [(), ("0",), ("0.weight",), ("1",)]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert len({wire.layout_digest(Layout.of(model, personal=names)) for names in personal}) == 4


def test_a_message_must_be_one_of_fedclades():
    with pytest.raises(
        UpdateError, match=r"should have the record 'fedclade', got the records \['vectors'\]"
    ):
        Content.of(RecordDict({"vectors": ArrayRecord()}))


def test_texts_of_others_are_cut_and_cleaned():
    assert wire.clean("all is well, Zoë") == "all is well, Zoë"
    assert wire.clean("a\x00b\r\nc\u200bd\ud800") == "a b  c d "
    assert wire.clean("x" * 11, 10) == "x" * 9 + "…"
    assert wire.clean("x" * 10, 10) == "x" * 10


def test_a_local_training_goes_there_and_back():
    spec = LocalTraining(epochs=3, lr=0.25, clip_norm=2.0)
    assert LocalTraining(**Content({"spec": wire.to_json(spec)}).json("spec")) == spec


def test_versions_with_the_same_format_work_together_and_others_are_named():
    """A client of an earlier version states no version of fedclade, or another one."""
    sent = dict(wire.record({"what": "hello"}).config_records["fedclade"])
    assert sent["fedclade"] == wire.RELEASE
    for release in ({"fedclade": "0.9.2"}, {}):
        values = {name: value for name, value in sent.items() if name != "fedclade"}
        earlier = RecordDict({"fedclade": ConfigRecord({**values, **release})})
        assert Content.of(earlier).get("what", str) == "hello"
        other = RecordDict({"fedclade": ConfigRecord({**values, **release, "protocol": 10})})
        with pytest.raises(UpdateError) as refusal:
            Content.of(other)
        theirs = release.get("fedclade", "of an earlier version")
        assert (
            f"the sender's fedclade is {theirs}, the receiver's is {wire.RELEASE}; install the same "
            "version"
        ) in str(refusal.value)


def test_the_first_difference_between_models_is_named():
    ours = {"a.weight": "[2, 3] float32", "a.bias": "[2] float32"}
    assert wire.first_difference(dict(ours), ours) == ""
    assert wire.first_difference({"a.bias": "[2] float32"}, ours) == (
        "'a.weight' is missing, which is [2, 3] float32 in the others"
    )
    assert wire.first_difference({**ours, "a.bias": "[4] float32"}, ours) == (
        "'a.bias' is [4] float32, and [2] float32 in the others"
    )
    assert wire.first_difference({**ours, "b": "[] int64"}, ours) == "'b' is unknown to the others"
    assert wire.first_difference({"b": "[] int64", **ours}, ours) == "'b' is unknown to the others"
    assert wire.first_difference({"a.weight": "[2, 3] float32"}, ours) == (
        "'a.bias' is missing, which is [2] float32 in the others"
    )
    assert wire.first_difference({"w": "[2, 3] float32", "a.bias": "[2] float32"}, ours) == (
        "'w' is in the place of 'a.weight' of the others"
    )


def described(names: list[str]) -> dict[str, str]:
    """Return the tensors of a model with layers of these names, as its client describes them."""
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(1)))
    return json.loads(wire.layout_arrays(Layout.of(module)))


def test_the_first_difference_between_models_too_long_for_a_message_is_named():
    names = [f"layer{k}" for k in range(1000)]
    ours = described(names)
    assert wire.CUT in ours
    # One tensor more at the start: the last tensors of the others are then not described.
    more = described(["extra", *names])
    assert wire.first_difference(more, ours) == "'extra' is unknown to the others"
    assert wire.first_difference(ours, more) == (
        "'extra' is missing, which is [1] float32 in the others"
    )
    # A difference that neither or only one side describes is not named.
    assert wire.first_difference(described([*names, "end"]), ours) == ""
    last = list(ours)[-2]
    longer = described([name + 200 * "x" if name == last else name for name in names])
    assert last in ours
    assert wire.first_difference(longer, ours) == ""
    assert wire.first_difference(ours, longer) == ""


def test_the_tensors_of_a_large_model_are_cut():
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(500)))
    text = wire.layout_arrays(Layout.of(module))
    assert len(text) <= wire.LONGEST_JSON
    assert json.loads(text)["0.weight"] == "[1, 1] float32"


def test_a_model_is_hashed_once_for_all_messages_that_contain_it(monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []

    def counting(content: bytes) -> str:
        hashed.append(len(content))
        return hashlib.sha256(content).hexdigest()

    monkeypatch.setattr("flwr.supercore.inflatable.inflatable_object.get_object_id", counting)
    LocalGrid({})  # tells Flower who sends
    arrays = wire.raw_vectors(torch.rand(2, 5000), [0, 1])
    for node in range(6):
        content = wire.record({"what": "train"}, {"model": arrays[node % 2]})
        assert Message(content, node, "train").object_id
    assert sum(size > 5000 for size in hashed) == 2  # one chunk for each model


@pytest.mark.parametrize("copies", [True, False])
def test_a_vector_may_have_the_memory_of_its_message(copies, recwarn: pytest.WarningsRecorder):
    data = np.arange(3, dtype="<f4").tobytes()
    vector = wire.read_vector(data, (3,), torch.float32, "a model", copies=copies)
    assert vector.tolist() == [0, 1, 2]
    shares = np.shares_memory(vector.numpy(), np.frombuffer(data, np.uint8))
    assert shares is (not copies)
    assert not recwarn.list


@given(st.dictionaries(st.text(), WORDS))
def test_values_arrive_as_they_were_sent(values):
    found = Content.of(wire.record(values)).values
    assert found == values
    assert [type(value) for _, value in sorted(found.items())] == [
        type(value) for _, value in sorted(values.items())
    ]
    assert wire.pack(dict(reversed(values.items()))) == wire.pack(values)


@given(st.binary())
def test_any_bytes_are_values_or_are_refused(data):
    record = wire.record({})
    record.config_records["fedclade"]["values"] = data
    try:
        found = Content.of(record).values
    except UpdateError:
        return
    assert all(isinstance(name, str) for name in found)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "are not in the format MessagePack"),
        (b"\x81\xa1a", "are not in the format MessagePack"),
        (b"\x01", "should be a map from names to values, got 1"),
        (b"\x81\x01\x01", "are not in the format MessagePack: int is not allowed for map key"),
        (b"\x81\xc4\x01a\x01", "should be a map from names to values, got {b'a': 1}"),
        (b"\xdf\xff\xff\xff\xff", "are not in the format MessagePack"),
        (b"\x91" * 5000, "are not in the format MessagePack"),
    ],
)
def test_values_that_are_no_map_by_names_are_refused(data, text):
    record = wire.record({})
    record.config_records["fedclade"]["values"] = data
    with pytest.raises(UpdateError, match=f"^the values of the message {re.escape(text)}"):
        Content.of(record)


def test_only_the_owner_of_vectors_releases_them():
    vector = wire.raw_vector(torch.ones(3))
    record = wire.record({"what": "train"}, {"model": vector})
    shared = Content.of(record)
    shared.release()
    assert shared.size == 12
    owner = Content.of(record).taken_from(record)
    assert owner.vector("model") == vector.data
    assert sorted(record) == ["fedclade"]
    owner.release()
    assert owner.size == 0
