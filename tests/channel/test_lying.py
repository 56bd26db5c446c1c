"""Adversaries as middleware: what each kind sends, of whom, from when on, and that it agrees with itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedclade import Adversary, ConfigError, LocalTraining
from fedclade.channel import Channel, CountSketch, Lying, Replicating
from fedclade.channel.adversary import KINDS
from fedclade.core import (
    ClientWork,
    Models,
    ParameterTree,
    Round,
    SplitPart,
    Splits,
    TrainQuery,
    row_norms,
)
from tests.reference import attacks as reference
from tests.tiny import ScriptedClients, federation_of, linear, simulated

N, D = 8, 40
LIARS = (2, 5)
ROUND = Round(3, LocalTraining(), seed=1)
KEYS = {client: 100 + client for client in range(N)}
DELTAS = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
HONEST = [client for client in range(N) if client not in LIARS]


def lying(kind: str, liars=LIARS, keys=KEYS, **options) -> Lying:
    made = Lying(Adversary(kind=kind, share=0.25, **options), liars, keys)
    made.begin(ROUND.number)
    return made


def sent(
    kind: str,
    rows=None,
    this_round=ROUND,
    what="train",
    liars=LIARS,
    keys=KEYS,
    work: ClientWork | None = None,
    **options,
):
    clients = Channel(
        ScriptedClients(dict(enumerate(DELTAS.tolist()))), lying(kind, liars, keys, **options)
    )
    query = list(range(N)), torch.zeros(2, D), rows or [0] * N, this_round
    return clients.gradients(*query) if what == "gradients" else clients.train(*query, work)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("label_flip", "backdoor")])
@pytest.mark.parametrize("what", ["train", "gradients"])
def test_honest_clients_are_left_alone_and_norms_are_those_of_what_is_sent(kind, what):
    updates = sent(kind, what=what)
    assert updates.ids == tuple(range(N))
    torch.testing.assert_close(updates.deltas[HONEST], DELTAS[HONEST], rtol=0, atol=0)
    assert torch.equal(updates.norms, row_norms(updates.deltas))
    assert torch.equal(updates.losses, sent("sign_flip", liars=(), what=what).losses)
    if kind != "false_size":
        assert not torch.allclose(updates.deltas[list(LIARS)], DELTAS[list(LIARS)])


def test_a_sign_flip_and_a_scaled_update_are_its_own():
    assert torch.equal(sent("sign_flip").deltas[list(LIARS)], -DELTAS[list(LIARS)])
    torch.testing.assert_close(sent("scaled").deltas[list(LIARS)], 10 * DELTAS[list(LIARS)])
    torch.testing.assert_close(
        sent("scaled", factor=-0.5).deltas[list(LIARS)], -0.5 * DELTAS[list(LIARS)]
    )


def test_gaussian_numbers_are_of_the_mean_and_deviation_asked_for():
    """80 draws: four standard errors of the mean are 0.5 · 4 / √80 = 0.22."""
    numbers = sent("gaussian", mean=3.0, std=0.5).deltas[list(LIARS)]
    assert float(numbers.mean()) == pytest.approx(3.0, abs=0.22)
    assert float(numbers.std()) == pytest.approx(0.5, abs=0.16)
    assert not torch.equal(numbers[0], numbers[1])


@pytest.mark.parametrize("rows", [[0] * N, [0, 1, 0, 1, 0, 1, 0, 1]])
@pytest.mark.parametrize("kind", ["alie", "ipm", "minmax", "minsum"])
def test_who_knows_others_makes_the_lie_of_those_that_were_sent_the_same_model(kind, rows):
    updates = sent(kind, rows=rows)
    for liar in LIARS:
        group = [client for client in range(N) if rows[client] == rows[liar]]
        honest, counts = (
            [DELTAS[c] for c in group if c in HONEST],
            (len(group), sum(c in LIARS for c in group)),
        )
        expected = {
            "alie": lambda honest=honest, of=counts: reference.alie(honest, *of),
            "ipm": lambda honest=honest: reference.ipm(honest, 2.0),
            "minmax": lambda honest=honest: reference.min_max(honest, "std"),
            "minsum": lambda honest=honest: reference.min_sum(honest, "std"),
        }[kind]()
        torch.testing.assert_close(updates.deltas[liar], expected, rtol=1e-4, atol=1e-5)


def test_options_say_how_far_and_of_whose_updates():
    torch.testing.assert_close(sent("ipm", epsilon=0.1).deltas[2], -0.1 * DELTAS[HONEST].mean(0))
    torch.testing.assert_close(
        sent("ipm", epsilon=0.1, knows="own").deltas[2], -0.1 * DELTAS[list(LIARS)].mean(0)
    )
    torch.testing.assert_close(
        sent("alie", z=1.5).deltas[5], DELTAS[HONEST].mean(0) + 1.5 * DELTAS[HONEST].std(0)
    )
    expected = reference.min_max([DELTAS[c] for c in HONEST], "unit")
    torch.testing.assert_close(
        sent("minmax", direction="unit").deltas[5], expected, rtol=1e-4, atol=1e-5
    )


def test_where_no_honest_client_was_sent_the_model_adversaries_go_by_their_own():
    rows = [1 if client in LIARS else 0 for client in range(N)]
    torch.testing.assert_close(sent("ipm", rows=rows).deltas[2], -2 * DELTAS[list(LIARS)].mean(0))
    assert torch.equal(sent("copy", rows=rows).deltas, DELTAS)


def test_a_copy_is_that_of_an_honest_client_and_noise_is_put_on_it():
    updates, noisy = sent("copy"), sent("copy", std=0.01)
    for liar in LIARS:
        (copied,) = [
            client for client in HONEST if torch.equal(updates.deltas[liar], DELTAS[client])
        ]
        assert 0 < float((noisy.deltas[liar] - DELTAS[copied]).abs().max()) < 0.06
    assert torch.equal(updates.deltas, sent("copy", this_round=replace(ROUND, number=9)).deltas), (
        "always the same"
    )


def test_sybils_send_one_direction_as_long_as_their_own_updates():
    updates = sent("sybil", factor=2.0)
    one, other = updates.deltas[list(LIARS)]
    assert float(torch.cosine_similarity(one, other, 0)) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(updates.norms[list(LIARS)], 2 * row_norms(DELTAS[list(LIARS)]))
    assert torch.equal(
        one, sent("sybil", factor=2.0, this_round=replace(ROUND, number=9)).deltas[2]
    )


def test_sizes_are_what_is_claimed_wherever_they_are_told():
    updates, clients = sent("false_size"), ScriptedClients(dict(enumerate(DELTAS.tolist())))
    assert updates.sizes[list(LIARS)].tolist() == [1e9, 1e9]
    assert torch.equal(updates.sizes[HONEST], sent("sign_flip").sizes[HONEST])
    sizes = Channel(clients, lying("sign_flip", size=77)).sizes
    assert {client: size for client, size in sizes.items() if size == 77}.keys() == set(LIARS)
    assert list(sizes) == list(clients.sizes)


@pytest.mark.parametrize("kind", ["sign_flip", "gaussian", "copy", "alie", "minmax", "sybil"])
def test_before_its_round_an_adversary_behaves(kind):
    later = Lying(Adversary(kind=kind, share=0.25, from_round=4, size=9), LIARS, KEYS)
    clients = Channel(ScriptedClients(dict(enumerate(DELTAS.tolist()))), later)
    for number in (3, 4):
        later.begin(number)
        updates = clients.train(
            list(range(N)), torch.zeros(1, D), [0] * N, replace(ROUND, number=number)
        )
        assert torch.equal(updates.deltas, DELTAS) == (number == 3)
        assert (updates.sizes[2] == 9) == (number == 4) == (clients.sizes[2] == 9)
        assert later.late == (set(LIARS) if (kind, number) == ("sybil", 3) else set())


def test_a_sleeper_behaves_until_a_cluster_of_others_is_there():
    sleeper = Lying(
        Adversary(kind="sign_flip", share=0.25, sleeper=True, from_round=2), LIARS, KEYS
    )
    whole = ParameterTree.root_only(range(N), torch.zeros(D))
    halves = ParameterTree.star([range(4), range(4, N)], torch.zeros(D))
    for number, tree, awake in (
        (3, None, False),
        (3, whole, False),
        (1, halves, False),
        (3, halves, True),
    ):
        sleeper.begin(number, tree)
        assert sleeper.awake == (set(LIARS) if awake else set())


def test_an_evasive_adversary_is_honest_only_where_parts_are_compared():
    checked = ClientWork(data=SplitPart(0, 4))
    assert torch.equal(sent("sign_flip", evasive=True, work=checked).deltas, DELTAS)
    for work in (None, ClientWork(data=SplitPart(0, 4, compared=False))):
        updates = sent("sign_flip", evasive=True, work=work)
        assert torch.equal(updates.deltas[list(LIARS)], -DELTAS[list(LIARS)])


def test_draws_belong_to_the_key_of_a_client_the_round_and_the_query():
    numbers = sent("gaussian").deltas[2]
    new = {client: (client + 3) % N for client in range(N)}
    keys = {new[client]: key for client, key in KEYS.items()}
    again = sent("gaussian", liars=[new[client] for client in LIARS], keys=keys).deltas[new[2]]
    assert torch.equal(numbers, again)
    for other in (replace(ROUND, number=4), replace(ROUND, query=1), replace(ROUND, seed=2)):
        assert not torch.equal(numbers, sent("gaussian", this_round=other).deltas[2])
    assert not torch.equal(numbers, sent("gaussian", what="gradients").deltas[2])


def test_what_is_too_long_to_be_used_is_left_out_as_an_honest_one_would_be():
    updates = sent("scaled", factor=1e30)
    assert updates.ids == tuple(HONEST)
    assert updates.left_out.keys() == set(LIARS)
    assert "more than 1e+18" in updates.left_out[2]


REPLICATED = ClientWork(data=Splits(2))


@pytest.mark.parametrize(
    "kind", ["sign_flip", "scaled", "gaussian", "alie", "minmax", "sybil", "copy", "false_size"]
)
def test_the_parts_of_a_lie_agree_with_it(kind):
    """The signatures are linear, so the mean of those of the parts is that of what is sent."""
    federation, sketch = federation_of([0] * N), CountSketch(0, 28, 12)
    made = Lying(Adversary(kind=kind, share=0.25), LIARS, federation.keys)
    made.begin(3)
    clients = Channel(simulated(federation, linear())[0], made, Replicating(sketch))
    updates = clients.train(list(range(N)), torch.zeros(1, 28), [0] * N, ROUND, REPLICATED)
    assert updates.parts.shape == (N, 2, 12)
    torch.testing.assert_close(
        updates.parts.mean(1), sketch.apply(updates.deltas), rtol=1e-4, atol=1e-5
    )
    assert float(updates.sizes[2]) == (1e9 if kind == "false_size" else 24)
    # of two parts, each of twice the variance: they do not agree on anything
    if kind == "gaussian":
        assert (
            abs(
                float(
                    torch.cosine_similarity(
                        *(updates.parts[2] - sketch.apply(torch.full((28,), 0.1))), 0
                    )
                )
            )
            < 0.9
        )


def test_gaussian_parts_have_a_mean_of_the_deviation_asked_for():
    """4 parts of 8 · 40 draws: the mean has deviation 1, and four standard errors of it are 4 / √640 = 0.16."""
    everybody = tuple(range(N))
    parts = [gaussian_of(part, everybody) for part in range(4)]
    assert float(torch.stack(parts).mean(0).std()) == pytest.approx(1.0, abs=0.16)


def gaussian_of(part: int, liars: tuple[int, ...]) -> torch.Tensor:
    """Return the false updates from one of four parts of the data."""
    data, local = Splits(4).split(part, ROUND.local)
    this_round = replace(ROUND, local=local, purpose=f"train {part}")
    work = ClientWork(data=data)
    return sent("gaussian", mean=0.0, std=1.0, liars=liars, this_round=this_round, work=work).deltas


def test_buffers_are_sent_as_they_are():
    class WithBuffers(ScriptedClients):
        def train(self, *args, **kwargs):
            return super().train(*args, **kwargs).with_common(n_parameters=30)

    clients = Channel(WithBuffers(dict(enumerate(DELTAS.tolist()))), lying("sign_flip"))
    updates = clients.train(list(range(N)), torch.zeros(1, D), [0] * N, ROUND)
    assert torch.equal(updates.deltas[2], torch.cat([-DELTAS[2, :30], DELTAS[2, 30:]]))
    assert updates.norms[2] == row_norms(DELTAS[:, :30])[2]


def test_a_lie_is_told_to_no_sink_before_all_are_there():
    asked = []

    class Noting(ScriptedClients):
        def ask(self, query, sink=None):
            asked.append(sink)
            return super().ask(query)

    told = []
    query = TrainQuery(list(range(N)), Models(torch.zeros(1, D), [0] * N), ROUND)
    clients = Channel(Noting(dict(enumerate(DELTAS.tolist()))), lying("alie"))
    clients.ask(query, told.append)
    assert asked == [None]
    assert told == []


@pytest.mark.parametrize(
    "given",
    [
        {"share": 0.0},
        {"share": 1.0},
        {"from_round": 1},
        {"size": 1},
        {"size": 2**53},
        {"kind": "backdoor", "target": 0, "patch": 1, "poisoned": 1.0},
        {"kind": "alie", "knows": "own"},
    ],
    ids=str,
)
def test_options_may_have_the_values_at_the_ends_of_their_ranges(given: dict[str, Any]):
    adversary = Adversary(**{"kind": "ipm", **given})
    assert {name: getattr(adversary, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "sign_flop"}, "adversary.kind: unknown 'sign_flop'|sign_flip"),
        ({"share": 0.1}, "adversary.kind"),
        ({"kind": "ipm", "share": 1.5}, r"adversary.share should be in \[0, 1\], got 1.5"),
        ({"kind": "ipm", "from_round": 0}, "adversary.from_round should be at least 1, got 0"),
        ({"kind": "ipm", "size": 0}, r"adversary.size should be from 1 to 2\*\*53, got 0"),
        (
            {"kind": "ipm", "z": 1.0},
            "adversary.z should be left out with kind 'ipm', which has epsilon, knows, got 1.0",
        ),
        (
            {"kind": "sign_flip", "factor": 2.0},
            "left out with kind 'sign_flip', which has no options, got 2.0",
        ),
        ({"kind": "scaled", "factor": float("inf")}, "adversary.factor should be finite, got inf"),
        (
            {"kind": "gaussian", "std": -1.0},
            "adversary.std should be at least 0 and finite, got -1.0",
        ),
        ({"kind": "alie", "z": float("nan")}, "adversary.z should be finite, got nan"),
        (
            {"kind": "ipm", "epsilon": -1.0},
            "adversary.epsilon should be at least 0 and finite, got -1.0",
        ),
        (
            {"kind": "minmax", "direction": "up"},
            "adversary.direction should be 'std', 'sign' or 'unit', got 'up'",
        ),
        (
            {"kind": "alie", "knows": "all"},
            "adversary.knows should be 'honest' or 'own', got 'all'",
        ),
        ({"kind": "backdoor", "target": -1}, "adversary.target should be at least 0, got -1"),
        ({"kind": "backdoor", "patch": 0}, "adversary.patch should be at least 1, got 0"),
        (
            {"kind": "backdoor", "poisoned": 0.0},
            "adversary.poisoned should be greater than 0 and at most 1, got 0.0",
        ),
    ],
)
def test_what_is_wrong_with_an_adversary_is_said(given, told):
    with pytest.raises(ConfigError, match=told):
        Adversary(**given)


def test_there_are_no_adversaries_by_default():
    assert not Adversary()
    assert not Adversary(kind="ipm")
    assert Adversary(kind="ipm", share=0.1)


def test_who_must_see_all_updates_cannot_be_in_a_stream():
    with pytest.raises(
        ConfigError,
        match=r"stream should be false or 'auto' with adversaries of kind 'alie', .* got True",
    ):
        Adversary(kind="alie", share=0.1).check_stream(True)
    Adversary(kind="alie", share=0.1).check_stream("auto")
    Adversary(kind="sign_flip", share=0.1).check_stream(True)
    Adversary(kind="alie").check_stream(True)
