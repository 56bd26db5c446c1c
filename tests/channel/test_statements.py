"""False statements of adversaries, and answers about poisoned data, for every kind of query."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import Adversary, ConfigError, LocalTraining
from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.channel import Channel, CountSketch, Lying, Replicating
from fedclade.channel.adversary import LIES
from fedclade.channel.compose import client_side
from fedclade.core import (
    Clients,
    ClientWork,
    EvaluationQuery,
    Models,
    Query,
    Round,
    Splits,
    TrainQuery,
)
from fedclade.data import LabelFlip, StatisticsQuery, poison_federation
from tests.tiny import federation_of, perceptron, simulated

N, ADVERSARIES, HONEST = 6, [1, 4], [0, 2, 3, 5]
FEDERATION = federation_of([0] * N)
MODELS = torch.stack([simulated(FEDERATION, perceptron(seed))[1] for seed in range(3)])
EVERYBODY = list(range(N))
ROUND = Round(2, LocalTraining(batch_size=8, lr=0.1), seed=1)


def evaluation(split: str) -> EvaluationQuery:
    """Return the query by which every client evaluates all three models."""
    ids = [client for client in EVERYBODY for _ in range(3)]
    return EvaluationQuery(ids, MODELS, [0, 1, 2] * N, split, compares=True)


QUERIES: dict[str, Query] = {
    "losses": evaluation("train"),
    "scores": evaluation("validation"),
    "subspaces": SubspaceQuery(EVERYBODY, 2, per_label=True),
    "descriptors": DescriptorQuery(EVERYBODY, MODELS[0], 0),
    "shifts": ShiftQuery(EVERYBODY, 2, 0.5, by_label=True),
    "statistics": StatisticsQuery(EVERYBODY, labels=FEDERATION.pool.outputs),
}


def asking(federation, number: int = 2, **settings) -> Clients:
    """Return clients of which two are adversaries."""
    lying = Lying(Adversary(share=0.3, **settings), ADVERSARIES, federation.keys)
    lying.begin(number)
    return Channel(simulated(federation, perceptron())[0], lying)


def rows(reply) -> torch.Tensor:
    """Return a reply to an evaluation or another query with a row for each client."""
    return (
        torch.cat([reply.scores, reply.losses[:, None]], 1).view(N, -1)
        if hasattr(reply, "scores")
        else reply
    )


BY_CLIENT = [name for name in QUERIES if name != "statistics"]


def flipped_by_hand():
    """Return the clients, two of which see every label y as C − 1 − y."""
    flip = torch.arange(FEDERATION.pool.outputs - 1, -1, -1)
    clients = [replace(c, label_map=flip) if c.id in ADVERSARIES else c for c in FEDERATION.clients]
    return replace(FEDERATION, clients=tuple(clients))


@pytest.mark.parametrize("name", QUERIES)
def test_answers_of_every_kind_are_about_poisoned_data(name):
    """FLUX's descriptors, FlexCFL's shifts and sums were once about clean data."""
    held = poison_federation(FEDERATION, ADVERSARIES, LabelFlip.of(FEDERATION.pool), 0)
    query, plain = QUERIES[name], simulated(flipped_by_hand(), perceptron())[0]
    # what is counted in a first round, before data is poisoned, is what shifts are seen by
    if name == "shifts":
        both = simulated(held, perceptron())[0]
        both.ask(replace(query, round=1))
        lying = Lying(Adversary(kind="label_flip", share=0.3), ADVERSARIES, FEDERATION.keys)
        lying.begin(2)
        assert (
            Channel(both, lying).ask(replace(query, share=0.1)).nonzero().flatten().tolist()
            == ADVERSARIES
        )
        return
    reply, expected = asking(held, kind="label_flip").ask(query), plain.ask(query)
    if name == "statistics":
        assert torch.equal(reply.labels, expected.labels)
        assert not torch.equal(
            reply.labels, simulated(FEDERATION, perceptron())[0].ask(query).labels
        )
    else:
        torch.testing.assert_close(rows(reply), rows(expected))


@pytest.mark.parametrize("name", BY_CLIENT)
def test_a_false_statement_is_that_of_adversaries_alone_and_from_their_round_on(name):
    query = QUERIES[name]
    honest = rows(simulated(FEDERATION, perceptron())[0].ask(query))
    false = rows(asking(FEDERATION, lies=name, from_round=2).ask(query))
    assert torch.equal(false[HONEST], honest[HONEST])
    for client in ADVERSARIES:
        assert not torch.equal(false[client], honest[client])
    assert torch.equal(
        rows(asking(FEDERATION, number=1, lies=name, from_round=2).ask(query)), honest
    )
    others = [lie for lie in LIES if lie not in (name, "signatures")]
    assert torch.equal(rows(asking(FEDERATION, lies=others).ask(query)), honest), (
        "each lie is of its kind alone"
    )


@pytest.mark.parametrize("name", ["losses", "scores"])
def test_what_is_reported_of_models_is_swapped_by_rank(name):
    query = QUERIES[name]
    honest, false = (
        simulated(FEDERATION, perceptron())[0].ask(query),
        asking(FEDERATION, lies=(name,)).ask(query),
    )
    for client in ADVERSARIES:
        places = slice(3 * client, 3 * client + 3)
        truth, told = honest.losses[places], false.losses[places]
        assert int(told.argmin()) == int(truth.argmax())
        assert int(told.argmax()) == int(truth.argmin())
        for column in ("losses", "scores", "wins"):
            mine, theirs = getattr(honest, column)[places], getattr(false, column)[places]
            assert torch.equal(mine[truth.argsort()], theirs[truth.argsort(descending=True)])
    assert false.ids == honest.ids


def test_scores_on_test_data_are_always_true():
    query = evaluation("test")
    truth, told = (
        simulated(FEDERATION, perceptron())[0].ask(query),
        asking(FEDERATION, lies=["losses", "scores"]),
    )
    assert torch.equal(rows(truth), rows(told.ask(query)))


def test_false_subspaces_are_orthonormal_and_differ_by_client():
    false = asking(FEDERATION, lies="subspaces").ask(QUERIES["subspaces"])
    one, other = false[ADVERSARIES].double()
    torch.testing.assert_close(
        one.mT @ one, torch.eye(2).expand(len(one), 2, 2).double(), atol=1e-5, rtol=0
    )
    assert not torch.allclose(one, other, atol=0.1)


def test_false_statistics_have_the_rarest_label_alone_and_inputs_far_off():
    alone = StatisticsQuery([ADVERSARIES[0]], labels=FEDERATION.pool.outputs)
    truth, false = (
        simulated(FEDERATION, perceptron())[0].ask(alone),
        asking(FEDERATION, lies="statistics").ask(alone),
    )
    assert false.count == truth.count
    assert false.labels.tolist()[int(truth.labels.argmin())] == int(truth.labels.sum())
    whole = asking(FEDERATION, lies="statistics").ask(QUERIES["statistics"])
    assert whole.count == sum(FEDERATION.sizes.values())


def test_honest_signatures_stand_beside_a_false_mean():
    sketch = CountSketch(0, MODELS.shape[1], MODELS.shape[1])
    models = Models(MODELS[:1], [0] * N)
    query = TrainQuery(EVERYBODY, models, ROUND, ClientWork(data=Splits(2)))

    def sent(**settings):
        lying = Lying(
            Adversary(kind="scaled", factor=-3.0, share=0.3, **settings),
            ADVERSARIES,
            FEDERATION.keys,
        )
        middleware = client_side(sketch=sketch, lying=lying)
        return Channel(simulated(FEDERATION, perceptron())[0], *middleware).ask(query)

    honest = Channel(simulated(FEDERATION, perceptron())[0], Replicating(sketch)).ask(query)
    false, agreeing = sent(lies="signatures"), sent()
    torch.testing.assert_close(false.parts, honest.parts)
    torch.testing.assert_close(false.deltas[ADVERSARIES], -3 * honest.deltas[ADVERSARIES])
    assert torch.equal(false.deltas[HONEST], honest.deltas[HONEST])
    torch.testing.assert_close(agreeing.parts[ADVERSARIES], -3 * honest.parts[ADVERSARIES])
    torch.testing.assert_close(agreeing.deltas, false.deltas)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lies": "loses"}, "unknown adversary.lies: 'loses'; did you mean 'losses'"),
        ({"lies": ["shifts", "sizes"]}, "unknown adversary.lies: 'sizes'"),
        (
            {"lies": "signatures"},
            "adversary.kind should be one of sign_flip, .* in addition to a false update, got ''",
        ),
        (
            {"lies": "signatures", "kind": "label_flip"},
            "adversary.kind should be one of .*, got 'label_flip'",
        ),
        ({"share": 0.2}, "unknown adversary.kind: ''"),
    ],
)
def test_a_wrong_statement_is_named(given, told):
    with pytest.raises(ConfigError, match=told):
        Adversary(**given)


def test_one_lie_may_be_named_without_a_list():
    assert Adversary(lies="losses", share=0.1) == Adversary(lies=["losses"], share=0.1)
    assert Adversary(lies=("losses",), share=0.1).lies == ("losses",)
