"""Privacy of single examples: what is withheld, what runs state and what real clients book."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade import (
    CFL,
    ConfigError,
    DataSchema,
    DifferentialPrivacy,
    ExamplePrivacy,
    FedAvg,
    FedRep,
    LocalTraining,
    PrivacyError,
    ReplicatedCFL,
    assign,
    federation,
    simulate,
)
from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.channel.accounting import Budget
from fedclade.channel.example_privacy import (
    PrivateExamples,
    StepLedger,
    booked_steps,
    epsilon_of_steps,
    mechanism_of,
    noisy_steps,
)
from fedclade.channel.middleware import Channel
from fedclade.channel.signature import Replicating
from fedclade.config import check_config
from fedclade.core import (
    AllData,
    ClientWork,
    Em,
    HeadThenBody,
    Mixture,
    Models,
    MoreauEnvelope,
    OfRounds,
    Round,
    SplitPart,
    Splits,
    Steps,
    TrainQuery,
)
from fedclade.core.work import Examples
from fedclade.data import StatisticsQuery
from fedclade.report.tables import facts
from fedclade.runs import check_inputs_apart
from fedclade.training.jobs import Draws
from tests.tiny import federation_of, linear, perceptron, simulated

PRIVACY = ExamplePrivacy(clip_norm=1.0, noise_multiplier=2.0)
SPEC = LocalTraining(epochs=3, batch_size=10)
ROUND = Round(3, SPEC, seed=1)
TRUTH = [0, 3] * 4
SIZES = [20 + 3 * i for i in range(8)]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("clip_norm", 0.0, "greater than 0 and finite"),
        ("noise_multiplier", -0.1, "at least 0 and finite"),
        ("delta", 1.0, "greater than 0 and less than 1"),
    ],
)
def test_a_setting_out_of_range_is_named(name, value, rule):
    with pytest.raises(ConfigError, match=f"privacy.{name} should be {rule}, got {value}"):
        ExamplePrivacy(**{"clip_norm": 1.0, name: value})


def test_the_level_of_a_config_says_whom_noise_protects():
    section = {"clip_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-6}
    assert (
        mechanism_of(section)
        == mechanism_of({**section, "level": "client"})
        == DifferentialPrivacy(**section)
    )
    assert mechanism_of({**section, "level": "example"}) == ExamplePrivacy(**section)
    assert mechanism_of({}) is None
    with pytest.raises(
        ConfigError, match=r"privacy.clip_norm should be a number if privacy.level = 'example'"
    ):
        mechanism_of({"level": "example"})
    with pytest.raises(
        ConfigError, match=r"privacy.level should be client or example, got 'label'"
    ):
        check_config({"privacy": {"level": "label"}})
    noted = check_config({"privacy": {**section, "level": "example"}}).as_dict()["privacy"]
    assert noted == {"permute": False, **section, "level": "example"}
    assert "level" not in check_config({"privacy": section}).as_dict()["privacy"]


# What a query costs


@pytest.mark.parametrize(
    ("change", "rate", "steps"),
    [
        ({}, 10 / 95, 30),  # 3 epochs of ⌈95 / 10⌉ batches
        ({"local": LocalTraining(steps=7, batch_size=10)}, 10 / 95, 7),
        ({"local": LocalTraining(batch_size=100)}, 1.0, 1),
        ({"steps": HeadThenBody(2)}, 10 / 95, 30 + 20),
        ({"data": Splits(2)}, 10 / 47, 15),  # parts of 47 and 48 examples
        ({"data": Splits(4, size=20)}, 4 / 20, 15),  # in batches of 4
        ({"data": Splits(4), "local": LocalTraining(steps=7, batch_size=10)}, 10 / 23, 2),
        ({"data": SplitPart(1, 2)}, 10 / 47, 15),
    ],
)
def test_a_query_costs_the_steps_of_its_largest_part_at_the_rate_of_its_smallest(
    change, rate, steps
):
    assert noisy_steps(query_of(**change), 95) == {rate: steps}


def query_of(local: LocalTraining = SPEC, params: torch.Tensor | None = None, **work) -> TrainQuery:
    """Return a query to two clients; ``work`` are parts of what they do."""
    vectors = torch.zeros(1, 1) if params is None else params[None]
    this_round = replace(ROUND, local=local)
    return TrainQuery([0, 1], Models(vectors, [0, 0]), this_round, ClientWork(**work))


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 40), st.integers(1, 3))
def test_no_part_costs_more_than_is_counted(examples, replicates, batch_size, epochs):
    splits = Splits(replicates)
    query = query_of(LocalTraining(epochs=epochs, batch_size=batch_size), data=splits)
    ((rate, steps),) = noisy_steps(query, examples).items()
    assert 0 < rate <= 1
    assert steps >= 1
    for place in range(replicates if examples >= replicates else 0):
        data, local = splits.split(place, query.local)
        count = len(query_of(local, data=data).examples(examples, 5))
        ((own, taken),) = noisy_steps(query_of(local), count).items()
        assert own <= rate
        assert taken <= steps


CLIENTS = st.dictionaries(
    st.integers(0, 9), st.dictionaries(st.sampled_from([0.1, 0.2, 0.5]), st.integers(1, 4))
)


@given(CLIENTS)
@settings(max_examples=12, deadline=None)
def test_what_a_run_states_is_at_least_what_each_client_spent(of_clients):
    told = PRIVACY.spent(of_clients, 3)
    each = [PRIVACY.epsilon(rates) for rates in of_clients.values()]
    assert told["epsilon"] >= max(each, default=0.0)
    assert told["releases"] == 3
    if all(len(rates) <= 1 for rates in of_clients.values()):
        assert told["epsilon"] == max(each, default=0.0)


# What is withheld


def asked(**work):
    clients, params = simulated(federation_of([0, 1]), linear())
    behind = Channel(clients, PrivateExamples(clients.sizes))
    return behind.ask(query_of(params=params, **work))


class OwnSteps(Steps):
    """Steps of a method, of which it is not declared that DP-SGD may take them."""


class NoisyOwnSteps(Steps):
    allows_noise = True


class MoreOwnSteps(Steps):
    def run(self, trainer):
        return trainer.train()


class NoisyHeirs(MoreOwnSteps):
    """Steps of a class above, which are declared here, and counted nowhere."""

    allows_noise = True


class OwnExamples(Examples):
    """Examples of a method, of which it is not known how many there are."""


def test_training_losses_are_withheld():
    updates = asked()
    assert updates.losses.isnan().all()
    assert updates.ids == (0, 1)


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ({"steps": Em(Mixture())}, "do not reveal the models of a mixture"),
        (
            {"steps": NoisyHeirs()},
            "the class NoisyHeirs does not declare that it trains with DP-SGD steps",
        ),
        (
            {"data": OfRounds({0: (1, 2), 1: (1, 2)})},
            "do not reveal updates trained on the combined examples that they had in several rounds",
        ),
        (
            {"steps": MoreauEnvelope(lam=1.0, steps=2, lr=0.1)},
            "the local rule moreau_envelope does not train with DP-SGD steps.*set privacy.level = 'client'",
        ),
        (
            {"steps": OwnSteps()},
            "the class OwnSteps does not declare that it trains .* set allows_noise = True",
        ),
        (
            {"data": OwnExamples()},
            r"do not reveal updates trained on examples that OwnExamples selects",
        ),
    ],
)
def test_updates_that_are_no_noisy_steps_are_refused(work, told):
    with pytest.raises(ConfigError, match=told):
        asked(**work)


def test_steps_of_a_method_pass_if_they_are_declared_as_those_of_dp_sgd():
    assert asked(steps=NoisyOwnSteps(), data=AllData()).ids == (0, 1)


def test_what_has_no_noise_is_refused_and_scores_are_not():
    clients, params = simulated(federation_of([0, 1]), linear())
    behind = Channel(clients, PrivateExamples(clients.sizes))
    everybody = [0, 1], params[None], [0, 0]
    told = behind.evaluate(*everybody, "test")
    assert torch.equal(told.losses, clients.evaluate(*everybody, "test").losses)
    with pytest.raises(ConfigError, match="do not reveal gradients over all their examples"):
        behind.gradients(*everybody, ROUND)
    with pytest.raises(ConfigError, match="do not reveal training losses"):
        behind.evaluate(*everybody, "train")
    with pytest.raises(ConfigError, match="do not reveal subspaces of their data"):
        behind.ask(SubspaceQuery([0, 1], 2, False))
    with pytest.raises(ConfigError, match="do not reveal descriptors of their data"):
        behind.ask(DescriptorQuery([0, 1], torch.zeros(1), 1))
    with pytest.raises(ConfigError, match="do not reveal shifts of their data"):
        behind.ask(ShiftQuery([0, 1], 1, 0.2, False))
    with pytest.raises(ConfigError, match="do not reveal sums of their data"):
        behind.ask(StatisticsQuery([0, 1]))


# A real client


def test_a_real_client_books_a_query_once_whatever_parts_it_has(tmp_path):
    clients, params = simulated(federation_of([0], [40]), linear())
    ledger = StepLedger(tmp_path / "ledger.json")
    client = Channel(
        clients, booked_steps(PRIVACY, ledger, "run 7", clients.sizes), Replicating(None)
    )
    client.train([0], params[None], [0], ROUND)
    in_splits = ClientWork(data=Splits(2))
    client.train([0], params[None], [0], replace(ROUND, number=4), in_splits)
    booked = [(e.run, e.round, e.noise_multiplier, e.rate, e.steps) for e in ledger.entries()]
    assert booked == [("run 7", 3, 2.0, 10 / 40, 12), ("run 7", 4, 2.0, 10 / 20, 6)]
    assert ledger.spent(1e-5) == epsilon_of_steps({(0.25, 2.0): 12, (0.5, 2.0): 6}, 1e-5)


def test_a_real_client_whose_budget_is_spent_does_not_even_train(tmp_path, monkeypatch):
    clients, params = simulated(federation_of([0], [40]), linear())
    once = PRIVACY.epsilon({0.25: 12})
    ledger = StepLedger(tmp_path / "ledger.json", Budget(epsilon=1.1 * once, level="example"))
    client = Channel(clients, booked_steps(PRIVACY, ledger, "run", clients.sizes))
    client.train([0], params[None], [0], ROUND)
    monkeypatch.setattr(clients, "handle_updates", None)
    with pytest.raises(
        PrivacyError,
        match=r"with this update the client would have spent ε = .* more than its budget",
    ):
        client.train([0], params[None], [0], ROUND)


# A whole run


def run_of(algorithm=None, privacy=PRIVACY, rounds=3, engine="stacked", model=None, **settings):
    federation = settings.pop("federation", None) or federation_of(TRUTH, SIZES, seed=1)
    settings = {"local": SPEC, **settings}
    model = model or perceptron(1)
    return simulate(
        algorithm or FedAvg(),
        model,
        federation,
        rounds=rounds,
        engine=engine,
        privacy=privacy,
        **settings,
    )


def test_a_run_states_what_its_clients_spent():
    """The smallest client has the largest rate, and here not the most steps: the largest of all ε counts."""
    run = run_of()
    each = {n: PRIVACY.epsilon({10 / n: 3 * SPEC.steps_with(n)}) for n in SIZES}
    worst = max(each, key=lambda n: each[n])
    assert run.summary["privacy"] == {
        **{
            "epsilon": each[worst],
            "level": "example",
            "clip_norm": 1.0,
            "noise_multiplier": 2.0,
            "delta": 1e-5,
        },
        **{"steps": 3 * SPEC.steps_with(worst), "releases": 3},
    }
    assert run.config["privacy"] == {"permute": False, **PRIVACY.section}
    assert [row["train_loss"] for row in run.metric_rows] == [None] * 3
    (told,) = [text for name, text in facts(run) if name == "privacy"]
    assert told.startswith(f"ε = {each[worst]:.3g} at δ = 1e-05 for each example; ")


def test_steps_are_counted_that_are_taken(monkeypatch):
    """Over all clients, rounds, parts and fractions: as many samples are drawn as a run with rcfl reports, or less."""
    taken = Counter[float]()
    sample = Draws.sample

    def counted(self):
        taken[self.rate] += 1
        return sample(self)

    monkeypatch.setattr(Draws, "sample", counted)
    brief = LocalTraining(epochs=1, batch_size=10)
    run = run_of(client_fraction=0.5, engine="loop", local=brief)
    steps = Counter[float]()
    for event in run.events:
        if event["kind"] == "stepped":
            steps[event["rate"]] += sum(event["clients"].values())
    assert taken == steps
    taken.clear()
    federation = federation_of(TRUTH, [48] * 8)  # quarters of 12
    run = run_of(ReplicatedCFL(), federation=federation, rounds=2, engine="loop", local=brief)
    stepped = [event for event in run.events if event["kind"] == "stepped"]
    assert {event["rate"] for event in stepped} == {4 / 12} == set(taken)  # in batches of 4
    assert sum(sum(event["clients"].values()) for event in stepped) * 4 == sum(taken.values())


def test_engines_give_the_run_of_the_loop():
    """The models before and after a split, far from where they began and from one another."""
    algorithm = CFL(eps1=100.0, eps2=1e-4, split_rounds=(1,))
    runs = {
        engine: run_of(algorithm, engine=engine, rounds=2) for engine in ("loop", "stacked", "vmap")
    }
    assert {engine: run.summary["engine"] for engine, run in runs.items()} == {
        name: name for name in runs
    }
    for one, other in pairwise(runs.values()):
        assert one.tree.leaf_of == other.tree.leaf_of
        for ours, theirs in zip(one.tree.nodes, other.tree.nodes, strict=True):
            torch.testing.assert_close(ours.params, theirs.params, rtol=1e-3, atol=1e-5)
        assert one.summary["privacy"] == other.summary["privacy"]
    root, *leaves = [node.params for node in runs["loop"].tree.nodes]
    assert len(leaves) == 2
    assert not torch.allclose(leaves[0], leaves[1], rtol=0.1, atol=1e-3)
    for leaf in leaves:
        assert not torch.allclose(leaf, root, rtol=0.1, atol=1e-3)


def test_without_noise_a_run_states_no_epsilon():
    assert (
        run_of(privacy=ExamplePrivacy(clip_norm=1.0), rounds=1).summary["privacy"]["epsilon"]
        is None
    )


def test_a_large_norm_and_whole_samples_are_plain_full_batches():
    local = LocalTraining(batch_size=1000, epochs=2, lr=0.1)
    plain = run_of(privacy=None, local=local)
    private = run_of(privacy=ExamplePrivacy(clip_norm=1e9), local=local)
    torch.testing.assert_close(
        private.tree.nodes[0].params, plain.tree.nodes[0].params, rtol=1e-4, atol=1e-6
    )


def test_personal_parameters_are_trained_by_noisy_steps_too():
    """Shared gradients depend on them; FedRep trains both apart, and each step counts."""
    run = run_of(
        FedRep(), federation=federation_of(TRUTH), local=LocalTraining(epochs=2, batch_size=12)
    )
    (event,) = [event for event in run.events if event["kind"] == "stepped" and event["round"] == 1]
    assert set(event["clients"].values()) == {2 * (2 + FedRep().head_epochs)}


def test_what_an_algorithm_asks_besides_is_refused():
    with pytest.raises(ConfigError, match="do not reveal training losses that IFCA requests"):
        run_of("ifca")
    with pytest.raises(ConfigError, match="do not reveal gradients over all their examples"):
        run_of(CFL(similarity="gradients", eps2=1e-3, split_rounds=(1,)))
    with pytest.raises(ConfigError, match=r"local rule .* does not train with DP-SGD steps"):
        run_of("scaffold", local=LocalTraining(batch_size=10))


def test_newcomers_to_a_private_run_are_private():
    federation = federation_of(TRUTH)
    run = run_of(CFL(), federation=federation, model=linear(1))
    newcomers = replace(federation, clients=federation.clients[:2], true_clusters=None)
    assert [each.node for each in assign(run, newcomers, model=linear(1)).assignments] == [0, 0]


def test_blocks_of_clients_change_no_draw():
    whole, small = run_of(), run_of(memory=1)
    torch.testing.assert_close(
        small.tree.nodes[0].params, whole.tree.nodes[0].params, rtol=1e-5, atol=1e-6
    )
    assert math.isfinite(whole.summary["privacy"]["epsilon"])


def table_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(60.0).reshape(20, 3).cos() + client, torch.arange(20) % 2


def test_inputs_that_are_scaled_by_a_clients_own_examples_are_refused():
    """One example moves the mean, and with it the gradient of every other one."""
    clients = {str(k): (table_of(k), table_of(k)) for k in range(2)}
    scaled = federation(clients, standardize="client")
    why = r"with standardize = 'client', an example changes the mean .* set standardize = 'none'"
    with pytest.raises(ConfigError, match=why):
        simulate("fedavg", "mclr", scaled, rounds=1, privacy=PRIVACY)
    with pytest.raises(ConfigError, match=why):
        check_config(
            {
                "data": {"files": "*.csv", "target": "y", "standardize": "client"},
                "privacy": {"level": "example", "clip_norm": 1.0},
            }
        )
    whole = DifferentialPrivacy(clip_norm=1.0)
    assert simulate("fedavg", "mclr", scaled, rounds=1, privacy=whole).summary["rounds"] == 1


def test_a_vocabulary_of_the_clients_own_texts_is_refused():
    rows = ["a rather good film", "a bad film"] * 10, [0, 1] * 10
    clients = {str(k): (rows, rows) for k in range(2)}
    with pytest.raises(
        ConfigError,
        match=r"a vocabulary made from the clients' own texts.* declare a schema with the words",
    ):
        simulate("fedavg", "lstm", federation(clients), rounds=1, privacy=PRIVACY)
    words = DataSchema(words=("<pad>", "<unk>", "film", "bad"))
    check_inputs_apart(PRIVACY, federation(clients, schema=words))
