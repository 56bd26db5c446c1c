"""FedEM and FedRC: against the papers' pseudo-code, and what mixtures must keep to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, FedEM, FedRC, LocalTraining, Run, simulate
from fedclade.algorithms import Algorithm
from fedclade.core import Mixture, RoundPlan
from fedclade.training.store import MIXTURE
from tests.reference.fedavg import as_numpy
from tests.reference.fedem import Client, mixtures, predicted, responsibilities
from tests.tiny import federation_of, linear, perceptron, play, simulated, task_federation

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 0, 1]
SIZES = [20, 26, 31, 24, 7]
BOTH = [FedEM(clusters=3), FedRC(clusters=3)]
each_method = pytest.mark.parametrize("algorithm", BOTH, ids=["fedem", "fedrc"])


def world(seed=0):
    return federation_of(TRUTH, SIZES, seed=seed)


def models(k: int, module=perceptron) -> torch.Tensor:
    return torch.stack([simulated(world(), module(j))[1] for j in range(k)])


def weights_of(clients) -> dict[int, torch.Tensor]:
    return {i: kept[MIXTURE] for i in clients.ids if MIXTURE in (kept := clients.store.latest(i))}


@each_method
def test_equals_algorithm_1_round_by_round(algorithm: Algorithm):
    """Models, weights, P̂ and leaves after each of 3 rounds of 3 clients, and the scores of all by the mixture."""
    federation, start, fraction = world(), models(3), 0.6
    clients, _ = simulated(federation, perceptron())
    played = play(algorithm, clients, start, 3, spec=SPEC, fraction=fraction)
    cohorts = [call.ids for call in played.clients.calls if call.what == "train"]
    by_label = isinstance(algorithm, FedRC)
    theta_0 = [as_numpy(model) for model in start]
    settings = {"seed": 0, "cohorts": cohorts, "by_label": by_label}
    expected = mixtures(theta_0, federation, perceptron(), SPEC, **settings)
    seen = set[int]()
    for state, wanted, cohort in zip(played.states[1:], expected, cohorts, strict=True):
        seen.update(cohort)
        for leaf, theta in zip(state.tree.leaves, wanted.theta, strict=True):
            np.testing.assert_allclose(leaf.params.numpy(), theta, atol=1e-5)
        leaves = {i: 1 + int(wanted.pi[i].argmax()) for i in cohort}
        assert {i: state.tree.leaf_of[i] for i in cohort} == leaves
        assert all(state.tree.leaf_of[i] == 0 for i in range(5) if i not in seen)
        if by_label:
            np.testing.assert_allclose(state.rates.numpy(), wanted.rates, atol=1e-6)
    last, kept = expected[-1], weights_of(clients)
    assert kept.keys() == seen
    final = played.states[-1]
    found = clients.evaluate(
        range(5), torch.stack([leaf.params for leaf in final.tree.leaves]), [0] * 5, "test",
        mixture=algorithm.mixture_after(final),
    )  # fmt: skip
    for i, client in enumerate(federation.clients):
        mine, pi = Client(i, client.key, federation, perceptron()), last.pi[i]
        if i in seen:
            np.testing.assert_allclose(kept[i].numpy(), pi, atol=1e-5)
        else:  # finds its weights with the models as they are
            pi = responsibilities(mine, np.full(3, 1 / 3), last.theta, last.rates).mean(0)
        x, y = federation.examples(i, "test")
        probabilities = predicted(mine, x, pi, last.theta)
        np.testing.assert_allclose(
            found.losses[i], -np.log(probabilities[np.arange(len(y)), y]).mean(), atol=1e-5
        )
        assert found.scores[i, 0] == pytest.approx((probabilities.argmax(1) == y.numpy()).mean())


@pytest.mark.parametrize("method", [FedEM, FedRC])
def test_one_model_is_fedavg_to_the_bit(method):
    federation = world()
    settings = {"rounds": 3, "local": SPEC, "engine": "loop", "client_fraction": 0.6}
    mine = simulate(method(clusters=1), linear, federation, **settings)
    theirs = simulate(FedAvg(), linear, federation, **settings)
    assert torch.equal(mine.tree.leaves[0].params, theirs.tree.nodes[0].params)
    assert mine.summary["accuracy"] == theirs.summary["accuracy"]


def test_responsibilities_sum_to_one_and_go_by_loss_weight_and_label():
    losses, pi, y = (
        torch.tensor([[0.0, 1.0], [2.0, 2.0]]),
        torch.tensor([0.25, 0.75]),
        torch.tensor([0, 1]),
    )
    q = Mixture().responsibilities(pi, losses, y)
    torch.testing.assert_close(q.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(q[1], pi.double())
    assert float(q[0, 0]) == pytest.approx(0.25 / (0.25 + 0.75 * np.exp(-1)))
    rates = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    q = Mixture(rates=rates).responsibilities(pi, losses, y)
    assert float(q[1, 1]) == pytest.approx((0.75 / 0.8) / (0.75 / 0.8 + 0.25 / 0.5))


def separated(algorithm: Algorithm, federation, seed: int = 0) -> Run:
    local = LocalTraining(epochs=2, batch_size=10, lr=0.3)
    return simulate(
        algorithm, perceptron, federation, rounds=25, local=local, engine="stacked", seed=seed
    )


def test_weights_part_clients_of_different_concepts():
    run = separated(FedEM(clusters=2), federation_of([0, 3] * 4, [60] * 8), seed=2)
    assert run.summary["clusters"]["ari"] == 1.0


@each_method
def test_traffic_is_all_models_both_ways(algorithm: Algorithm):
    run = simulate(algorithm, linear, world(), rounds=2, local=SPEC, engine="loop")
    S, table = run.tree.nodes[0].params.numel(), 3 * 4 * isinstance(algorithm, FedRC)
    assert run.summary["bytes_up"] == 2 * 5 * 4 * (3 * S + table)
    # P̂ in double precision, from round 2 on
    assert run.summary["bytes_down"] == 2 * 5 * 4 * 3 * S + 5 * 8 * table


def test_too_few_answers_leave_all_as_it_is():
    clients, _ = simulated(world(), linear())
    algorithm = FedRC(clusters=2)
    state = algorithm.init(models(2, linear), clients)
    after, log = algorithm.step(state, [0, 1], clients, RoundPlan(1, SPEC, min_clients=3))
    assert after.tree is state.tree
    assert after.rates is None
    assert [(event.kind, event.node) for event in log.events] == [("too_few", 1), ("too_few", 2)]


@pytest.mark.parametrize(("task", "outputs"), [("binary", 0), ("multilabel", 2), ("regression", 2)])
def test_other_tasks_mix_probabilities_or_numbers(task, outputs):
    federation = task_federation(task, [0, 1, 0, 1], outputs=outputs)
    settings = {"rounds": 3, "local": LocalTraining(batch_size=8, lr=0.05), "engine": "loop"}
    one = simulate(FedEM(clusters=1), "mclr", federation, **settings)
    assert one.summary[one.summary["metrics"][0]["name"]] == pytest.approx(
        simulate(FedAvg(), "mclr", federation, **settings).summary[
            one.summary["metrics"][0]["name"]
        ]
    )
    simulate(FedEM(clusters=2), "mclr", federation, **settings)
    if task != "binary":
        with pytest.raises(
            ConfigError,
            match="a mixture that counts responsibilities by label, as in algorithm fedrc, needs a task",
        ):
            simulate(FedRC(clusters=2), "mclr", federation, **settings)


def test_what_cannot_be_mixed_is_said():
    with pytest.raises(ConfigError, match="clusters should be at least 1, got 0"):
        FedEM(clusters=0)
    with pytest.raises(ConfigError, match="fedrc needs 2 different initial models, got 1"):
        FedRC(clusters=2).init(models(1, linear).expand(2, -1), simulated(world(), linear())[0])
    with pytest.raises(
        ConfigError, match=r"model\.personal cannot be used with a mixture of models"
    ):
        simulate(FedEM(), perceptron, world(), rounds=1, personal="head")


def test_a_finished_run_has_the_weights_of_those_that_trained(tmp_path):
    run = simulate(
        FedEM(), linear, world(), rounds=2, local=SPEC, engine="loop", folder=tmp_path / "run"
    )
    for kept in (run.kept, Run.load(tmp_path / "run").kept):
        assert kept.keys() == set(range(5))
        for client, mine in kept.items():
            pi = mine[MIXTURE]
            assert float(pi.sum()) == pytest.approx(1)
            assert run.tree.leaf_of[client] == 1 + int(pi.argmax())
