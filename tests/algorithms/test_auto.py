"""The method auto: which model serves each client, what that costs, and what clients store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from fedclade import (
    Adversary,
    Auto,
    Churn,
    ConfigError,
    DataError,
    DifferentialPrivacy,
    Faults,
    FedAvg,
    LocalTraining,
    ReplicatedCFL,
    Run,
    assign,
    export_model,
    simulate,
)
from fedclade.algorithms import RunFacts
from fedclade.algorithms.auto import method
from fedclade.algorithms.auto.budget import count_steps
from fedclade.algorithms.auto.choice import Choice, Losses, choose_candidates
from fedclade.algorithms.auto.method import (
    MODEL_KINDS,
    AutoState,
    Rung,
    _check_left_out,
    _continue_with_last_cluster,
)
from fedclade.core import (
    OWN,
    Clients,
    ClientWork,
    Evaluation,
    FullGradient,
    Lasting,
    LastLayer,
    Round,
    RoundPlan,
    Sink,
    Splits,
    TrainQuery,
)
from fedclade.data.federation import Federation
from fedclade.training import SimulatedClients
from tests.tiny import (
    Around,
    Asked,
    Played,
    ScriptedClients,
    SpyClients,
    federation_of,
    linear,
    replicating,
)

LOCAL = LocalTraining(epochs=2, batch_size=10, lr=0.3)
ALIKE = federation_of([0] * 12, [24] * 12, validation=60)
"""A client that trains alone learns its few examples by heart."""
TWO = federation_of([0, 1] * 6, [60] * 12, validation=40)
LONE = federation_of([0, 1, 2, 3], [120] * 4, validation=60)
"""Four clients, each with labels of its own."""
FEW = federation_of([0, 0, 0, 1, 1, 1], [30, 90] * 3, validation=60)


def play(
    algorithm: Auto,
    federation: Federation,
    rounds: int,
    *,
    fraction: float = 1.0,
    every: int = 1,
    local: LocalTraining = LOCAL,
    clients: Clients | None = None,
) -> Played:
    """Run the method as ``simulate`` does, and keep all states; models are chosen every some rounds."""
    found, params = replicating(federation, linear())
    spy = SpyClients(clients or found)
    states, logs = [algorithm.init(params, spy)], []
    for number in range(1, rounds + 1):
        evaluated = number % every == 0 or number == rounds
        this_round = RoundPlan(number, local, 0, evaluated=evaluated, rounds=rounds)
        cohort = algorithm.sample_cohort(states[-1], fraction, this_round.generator("cohort"))
        state, log = algorithm.step(states[-1], cohort, spy, this_round)
        states.append(state)
        logs.append(log)
    return Played(states, logs, spy)


def run_of(federation, algorithm=None, **settings) -> Run:
    settings = {"local": LOCAL, "rounds": 6, "engine": "loop", "evaluate_every": 6} | settings
    return simulate(algorithm or Auto(), settings.pop("model", linear()), federation, **settings)


def served(run: Run) -> dict[str, list[int]]:
    """Return the clients of each kind of model in the last choice of a run."""
    return [event for event in run.events if event["kind"] == "served"][-1]["clients"]


@contextmanager
def counted_steps() -> Iterator[Counter[str]]:
    """Count the training steps of all clients, where simulated clients carry out the queries."""
    count: Counter[str] = Counter()
    handle_updates = SimulatedClients.handle_updates

    def handle(clients: SimulatedClients, query: TrainQuery, sink: Sink | None = None):
        for client in query.ids:
            examples = len(query.examples(clients.sizes[client], key=0))
            count["steps"] += query.work.steps.count_steps(query.local, examples)
        return handle_updates(clients, query, sink)

    with mock.patch.object(SimulatedClients, "handle_updates", handle):
        yield count


# Models


def test_clients_of_one_distribution_are_served_with_one_model_which_is_that_of_rcfl():
    settings = {"rounds": 15, "evaluate_every": 15, "engine": "stacked"}
    run = run_of(ALIKE, **settings)
    other = run_of(ALIKE, ReplicatedCFL(check_every=14), **settings)
    assert served(run) == {"one model": list(range(12))}
    assert run.kept == {}
    assert torch.equal(run.tree.nodes[0].model, other.tree.nodes[0].model)
    assert len(run.tree.leaves) == 1


def test_clusters_are_those_of_rcfl_and_the_root_is_trained_beside():
    run = run_of(TWO, rounds=8, evaluate_every=8, engine="stacked")
    other = run_of(TWO, ReplicatedCFL(check_every=14), rounds=8, evaluate_every=8, engine="stacked")
    assert [leaf.members for leaf in run.tree.leaves] == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)]
    for leaf, expected in zip(run.tree.leaves, other.tree.leaves, strict=True):
        assert torch.equal(leaf.params, expected.params)
    assert run.tree.nodes[0].continued is not None


def test_clients_with_two_orders_of_labels_are_served_with_their_clusters_models():
    """With the budget of the clusters alone there is no other candidate for them."""
    run = run_of(TWO, Auto(budget=1.0), rounds=8, evaluate_every=8, engine="stacked")
    assert served(run) == {"cluster": list(range(12))}
    assert run.kept == {}


def test_clients_that_all_differ_are_served_with_personal_models():
    run = run_of(LONE, Auto(budget=4.0), rounds=12, evaluate_every=12)
    personal = {"personal head", "fine-tuned", "fine-tuned one model", "own"}
    alone = {"cluster"}  # a cluster of one client is the client's own
    assert set(served(run)) <= personal | alone
    assert run.summary["accuracy"]["mean"] > 0.75


def test_a_candidate_is_chosen_by_the_losses_that_its_event_reports():
    played = play(Auto(budget=4.0), LONE, 12, every=12)
    state = played.states[-1]
    assert isinstance(state, AutoState)
    event = played.logs[-1].events[-1]
    assert {client for ids in event.clients.values() for client in ids} == set(range(4))
    for name, ids in event.clients.items():
        assert all(MODEL_KINDS[state.rung_of[client]] == name for client in ids)
    assert event.gains.keys() == set(range(4))
    departed = set(range(4)) - set(event.clients.get(event.common, ()))
    assert all(event.gains[client] > 0 for client in departed)
    assert all(event.gains[client] == 0 for client in set(range(4)) - departed)


@contextmanager
def recorded_choices() -> Iterator[list[tuple[Losses, Choice]]]:
    """Record the losses and the result of each choice."""
    found: list[tuple[Losses, Choice]] = []

    def choose(losses: Losses) -> Choice:
        found.append((losses, choose_candidates(losses)))
        return found[-1][1]

    with mock.patch.object(method, "choose_candidates", choose):
        yield found


def chosen_losses(losses: Losses, choice: Choice) -> dict[int, float]:
    """Return the loss of each client with the candidate that was chosen for it."""
    return {c: losses.values[i, choice.chosen[i]] for i, c in enumerate(losses.ids)}


def losses_now(clients: Clients, state: AutoState) -> dict[int, float]:
    """Return the validation loss of each client with the model that it is served with."""
    served_with = Auto().models_for(state, clients)
    models, rows = state.tree.models([served_with.nodes[c] for c in clients.ids], served=True)
    rows = [OWN if c in served_with.own else r for c, r in zip(clients.ids, rows, strict=True)]
    answer = clients.evaluate(clients.ids, models, rows, "validation")
    return dict(zip(answer.ids, answer.losses.tolist(), strict=True))


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("federation", "budget"), [(TWO, 2.5), (LONE, 4.0), (FEW, 10.0)])
def test_each_client_is_served_with_the_model_that_was_chosen(federation, budget, fraction, every):
    """Its loss is that of the candidate in the choice, though clients have made other copies since."""
    with recorded_choices() as choices:
        played = play(Auto(budget=budget), federation, 10, every=every, fraction=fraction)
    state = played.states[-1]
    assert state.keepers, "no client has a personal model: the test shows nothing"
    assert losses_now(played.clients, state) == chosen_losses(*choices[-1])


def test_the_copies_of_the_last_round_are_models_after_a_round_of_training():
    played = play(Auto(budget=6.0), TWO, 5, every=5)
    state, calls = played.states[-1], played.clients.asked("train", 5)
    tuning = [call for call in calls if call.round.purpose == "finetune"]
    steps = [type(call.work.steps).__name__ for call in tuning[:3]]
    assert steps == ["Sgd", "LastLayer", "Sgd"]
    for call, of in zip(tuning[:3], ["leaf", "leaf", "root"], strict=True):
        assert call.ids == tuple(range(12))
        assert not call.work.sends_update
        assert call.own
        for client, model in call.models.items():
            node = state.tree.leaf_of[client] if of == "leaf" else 0
            assert torch.equal(model, state.tree.nodes[node].model)


def test_a_client_that_makes_no_copy_again_is_not_served_with_another_one():
    """The copy was chosen, and replaced by the next one; the client is away when it is to be made again."""

    class Leaving(Around):
        made = 0

        def train(self, ids, models, assignment, this_round, work=None, **more):
            if this_round.purpose == "finetune":
                self.made += 1
                if self.made > 2:
                    ids, assignment = ids[1:], assignment[1:]
            return super().train(ids, models, assignment, this_round, work, **more)

    inner, _ = replicating(FEW, linear())
    played = play(Auto(budget=4.0), FEW, 10, every=10, clients=Leaving(inner))
    again = [call for call in played.clients.asked("train", 10) if call.own][3:]
    assert again, "no client has to make a copy again: the test shows nothing"
    state = played.states[-1]
    for call in again:
        assert call.ids[0] not in state.keepers
        assert set(call.ids[1:]) <= set(state.keepers)
    event = played.logs[-1].events[-1]
    assert set(state.keepers).isdisjoint(event.clients.get("cluster", ()))


def test_a_client_whose_own_model_was_replaced_by_a_copy_has_it_no_more():
    """It made the copies of the last round, but did not train its own model after them."""

    class Leaving(Around):
        def train(self, ids, models, assignment, this_round, work=None, **more):
            if (
                this_round.number == 10
                and this_round.purpose == "train"
                and work.store != Lasting()
            ):
                ids, assignment = ids[1:], assignment[1:]
            return super().train(ids, models, assignment, this_round, work, **more)

    inner, _ = replicating(LONE, linear())
    with recorded_choices() as choices:
        played = play(Auto(budget=6.0), LONE, 10, every=10, clients=Leaving(inner))
    state = played.states[-1]
    assert played.states[-2].own == (0, 1, 2, 3)
    assert state.own == (1, 2, 3)
    assert losses_now(played.clients, state) == chosen_losses(*choices[-1])


def test_models_are_known_without_a_query():
    played = play(Auto(budget=4.0), TWO, 6, every=6)
    before = len(played.clients.calls)
    models = Auto().models_for(played.states[-1], played.clients)
    assert len(played.clients.calls) == before
    assert models.own == played.states[-1].keepers
    assert models.nodes.keys() == set(range(12))


def test_clients_with_one_model_are_evaluated_with_the_root():
    state = play(Auto(budget=1.0), TWO, 4).states[-1]
    rungs = tuple(Rung.ONE_MODEL if c == 3 else Rung.CLUSTER for c in state.clients)
    nodes = Auto().models_for(replace(state, rungs=rungs), ScriptedClients({})).nodes
    assert nodes == {**state.tree.leaf_of, 3: 0}


# Candidates that are given up


def test_own_models_that_no_client_needs_are_trained_no_further():
    played = play(Auto(budget=4.0), ALIKE, 16, every=16)
    stopped = [state.own_stopped for state in played.states]
    assert stopped == sorted(stopped)
    assert stopped[-1]
    first = stopped.index(True)
    trained = [len(_own_training(played, number)) for number in range(1, 17)]
    assert sum(trained[:first]) >= 3
    assert sum(trained[first:]) == 0


def test_one_model_that_no_client_needs_is_trained_no_further():
    played = play(Auto(budget=2.5), TWO, 14, every=14)
    stopped = [state.beside_stopped for state in played.states]
    assert stopped == sorted(stopped)
    assert stopped[-1]
    beside = [
        any(call.round.purpose == "beside" for call in played.clients.asked("train", number))
        for number in range(1, 15)
    ]
    assert any(beside)
    assert not any(beside[stopped.index(True) :])


def test_a_model_that_is_trained_no_further_remains_a_candidate():
    with recorded_choices() as choices:
        played = play(Auto(budget=2.5), TWO, 14, every=14)
    state, clients = played.states[-1], played.clients
    assert state.beside_stopped
    losses, _ = choices[-1]
    answer = clients.evaluate(clients.ids, state.tree.nodes[0].model[None], [0] * 12, "validation")
    assert losses.values[:, 0].tolist() == answer.losses.tolist()


def _epochs_of_own_training(played: Played, rounds: int) -> list[int]:
    """Return the epochs in which clients train their own models in each round; 0 if they do not."""
    calls = [_own_training(played, number) for number in range(1, rounds + 1)]
    assert all(len(of_round) <= 1 for of_round in calls)
    return [of_round[0].round.local.epochs if of_round else 0 for of_round in calls]


def test_own_models_catch_up_with_training_alone_in_the_second_half_of_a_run():
    """In a round of training alone clients train for two epochs; these own models begin in round 4."""
    played = play(Auto(budget=4.0), LONE, 20, every=20)
    epochs = _epochs_of_own_training(played, 20)
    assert epochs[:3] == [0, 0, 0]
    assert epochs[3:9] == [2] * 6
    assert epochs[9:12] == [4] * 3
    assert epochs[12:] == [2] * 8
    assert sum(epochs) == 2 * 20
    assert played.states[-1].own_rounds == 20


def test_shared_models_are_trained_no_further_if_all_clients_need_their_own():
    played = play(Auto(budget=4.0), LONE, 20, every=20)
    stopped = [state.shared_stopped for state in played.states]
    assert stopped == [False] * 12 + [True] * 9
    before, after = played.states[12].tree, played.states[-1].tree
    assert before.leaf_of == after.leaf_of
    for old, new in zip(before.nodes, after.nodes, strict=True):
        assert torch.equal(old.model, new.model)
    for number in range(13, 20):
        (call,) = played.clients.asked("train", number)
        assert call.own
        assert played.logs[number - 1].losses.keys() == {0, 1, 2, 3}


def test_shared_models_are_trained_again_if_the_data_changes():
    class Changing(Around):
        stage = 0

    inner, _ = replicating(LONE, linear())
    clients = Changing(inner)
    state = play(Auto(budget=4.0), LONE, 13, every=20, clients=clients).states[12]
    state = replace(state, shared_stopped=True)
    this_round = RoundPlan(13, LOCAL, 0, rounds=20)
    for stage, trains in ((0, False), (1, True)):
        clients.stage = stage
        after, _ = Auto(budget=4.0).step(state, (0, 1, 2, 3), clients, this_round)
        models = [
            torch.equal(a.model, b.model)
            for a, b in zip(state.tree.leaves, after.tree.leaves, strict=True)
        ]
        assert not any(models) if trains else all(models)
        assert after.shared_stopped is not trains


def test_a_quarter_of_each_cluster_trains_the_model_for_all():
    played = play(Auto(), TWO, 7, every=7)
    (call,) = [c for c in played.clients.asked("train", 5) if c.round.purpose == "beside"]
    assert [sum(client % 2 == cluster for client in call.ids) for cluster in (0, 1)] == [2, 2]


def _own_training(played: Played, number: int) -> list[Asked]:
    """Return the calls by which clients trained their own models for several rounds."""
    calls = played.clients.asked("train", number)
    return [call for call in calls if call.own and call.round.purpose == "train"]


def test_the_first_round_of_own_models_trains_the_last_layer():
    played = play(Auto(budget=4.0), LONE, 8, every=8)
    calls = [call for number in range(1, 9) for call in _own_training(played, number)]
    assert [isinstance(call.work.steps, LastLayer) for call in calls] == [True] + [False] * (
        len(calls) - 1
    )
    assert len(calls) > 1
    assert calls[1].models == {}  # each continues with the model that it stores


def test_if_one_cluster_is_left_its_model_is_the_model_for_all():
    """The root's model was not trained while there were several clusters."""
    state = play(Auto(budget=1.0), TWO, 5).states[-1]
    tree = state.tree.continued(torch.full_like(state.tree.nodes[0].params, 9.0))
    first, second = tree.leaves
    tree = tree.reassigned(dict.fromkeys(second.members, first.id))
    joined = _continue_with_last_cluster(replace(state, tree=tree))
    assert torch.equal(joined.tree.nodes[0].model, tree.nodes[first.id].params)
    assert _continue_with_last_cluster(state) is state


# Budget


SLOW = pytest.mark.slow


@pytest.mark.parametrize("federation", [ALIKE, TWO], ids=["alike", "two"])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize(
    ("rounds", "budgets"),
    [
        (5, (4.0,)),
        (10, (2.5,)),
        pytest.param(5, (1.5, 2.5), marks=SLOW),
        pytest.param(10, (1.5, 4.0), marks=SLOW),
        pytest.param(20, (1.5, 2.5, 4.0), marks=SLOW),
        pytest.param(50, (1.5, 2.5, 4.0), marks=SLOW),
    ],
)
def test_the_budget_holds(federation, fraction, rounds, budgets):
    """Only the training of the clusters and their checks may exceed it, as they do in rcfl."""
    local = LocalTraining(batch_size=20, lr=0.3)
    settings = {
        "rounds": rounds,
        "client_fraction": fraction,
        "local": local,
        "evaluate_every": rounds,
        "engine": "stacked",
    }
    with counted_steps() as of_fedavg:
        run_of(federation, FedAvg(), **settings)
    with counted_steps() as of_rcfl:
        run_of(federation, ReplicatedCFL(check_every=14), **settings)
    for budget in budgets:
        with counted_steps() as count:
            run_of(federation, Auto(budget=budget), **settings)
        assert count["steps"] <= max(budget * of_fedavg["steps"], of_rcfl["steps"])


@pytest.mark.parametrize(
    ("federation", "rounds", "fraction", "every"),
    [(TWO, 10, 1.0, 10), (TWO, 15, 0.5, 4), (LONE, 16, 1.0, 16), (ALIKE, 5, 0.3, 1)],
)
def test_the_steps_of_the_state_are_those_of_the_clients(federation, rounds, fraction, every):
    with counted_steps() as count:
        played = play(Auto(budget=4.0), federation, rounds, fraction=fraction, every=every)
    assert played.states[-1].steps == count["steps"]
    cohorts = [
        len({c for call in played.clients.asked("train", n) for c in call.ids})
        for n in range(1, rounds + 1)
    ]
    if fraction == 1.0:
        assert cohorts == [len(federation.ids)] * rounds
        sizes = federation.clients[0].train
        per_client = LOCAL.steps_with(len(sizes))
        assert played.states[-1].steps_of_fedavg == sum(cohorts) * per_client


def test_gradients_are_no_steps_and_splits_count_separately():
    sizes = {0: 25, 1: 40}
    local = LocalTraining(epochs=2, batch_size=10)
    assert count_steps(ClientWork(), local, sizes, [0, 1]) == 2 * 3 + 2 * 4
    assert count_steps(ClientWork(steps=FullGradient()), local, sizes, [0, 1]) == 0
    assert count_steps(ClientWork(data=Splits(2, 0)), local, sizes, [1]) == 2 * 2 * 2


# Errors and warnings


def test_without_validation_data_it_is_said_what_to_set():
    federation = federation_of([0, 1] * 3, validation=0)
    with pytest.raises(DataError, match=r"set data\.validation_fraction above 0"):
        run_of(federation)


def test_policies_that_forbid_scores_are_named():
    answer = Evaluation(
        (), torch.zeros(0, 1), torch.zeros(0), torch.zeros(0), left_out={3: "its policy"}
    )
    with pytest.raises(
        ConfigError,
        match=r"round 7: the algorithm auto chooses .* no client has sent any \(client 3: its policy"
        r"\); give clients validation data, .* or use the algorithm rcfl",
    ):
        _check_left_out(answer, Round(7, LOCAL))


def test_a_budget_below_1_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.budget should be at least 1, got 0\.5"):
        Auto(budget=0.5)


@pytest.mark.parametrize("option", ["level", "check_every", "sharing", "sample"])
def test_options_of_rcfl_are_checked(option):
    with pytest.raises(ConfigError, match=rf"algorithm\.{option}"):
        Auto(**{option: -1})


def test_few_rounds_are_warned_of():
    assert len(Auto().check(RunFacts(rounds=2))) == 1
    assert len(Auto().check(RunFacts(rounds=9))) == 0


# Runs with clients that come, go, fail or lie


def with_two_newcomers() -> Federation:
    """Return the federation of 12 clients of two kinds, and newcomers 12 and 13, one of each kind."""
    federation = federation_of([0, 1] * 7, [60] * 14, validation=40)
    newcomers = replace(federation, clients=federation.clients[12:], true_clusters=None)
    members = replace(federation, clients=federation.clients[:12], true_clusters=None)
    return replace(members, newcomers=newcomers)


def test_clients_that_join_are_served_and_those_that_leave_are_not():
    federation = with_two_newcomers()
    run = run_of(
        federation,
        Auto(budget=4.0),
        rounds=10,
        evaluate_every=5,
        presence=Churn(join_round=4, leave_round=6),
    )
    last = run.clients[run.clients["round"] == 10]
    assert len(last) == 12
    present = set(last["client"])
    ids = {client for ids in served(run).values() for client in ids}
    assert ids == present
    assert last["accuracy"].mean() > 0.6


@pytest.mark.parametrize("every", [1, 10])
def test_with_faults_each_client_is_served_with_the_model_that_was_chosen(every):
    run = run_of(
        TWO,
        Auto(budget=6.0),
        rounds=10,
        evaluate_every=every,
        faults=Faults(dropout=0.3),
        client_fraction=0.5,
    )
    kinds = served(run)
    personal = {
        c for name, ids in kinds.items() if name not in ("one model", "cluster") for c in ids
    }
    assert set(run.kept) == personal
    assert run.summary["accuracy"]["mean"] > 0.6


def test_newcomers_after_the_run_are_assigned_to_their_clusters():
    federation = with_two_newcomers()
    assert federation.newcomers is not None
    run = run_of(replace(federation, newcomers=None), rounds=8, evaluate_every=8)
    found = assign(run, federation.newcomers, algorithm=Auto(), model=linear()).assignments
    assert [each.node for each in found] == [run.tree.leaf_of[0], run.tree.leaf_of[1]]


def test_the_model_of_a_client_that_has_a_personal_one_is_exported(tmp_path):
    run = run_of(LONE, Auto(budget=4.0), rounds=8, evaluate_every=8)
    client = next(iter(run.kept))
    export_model(run, tmp_path / "own.safetensors", client=client)
    found = load_file(tmp_path / "own.safetensors")
    shared = run.layout.state_dict(run.tree.nodes[run.tree.leaf_of[client]].params)
    assert any(not torch.equal(found[name], shared[name]) for name in shared)


def test_private_clients_are_served():
    run = run_of(
        TWO,
        Auto(),
        rounds=5,
        privacy=DifferentialPrivacy(clip_norm=1.0, noise_multiplier=0.01),
        engine="stacked",
    )
    assert {client for ids in served(run).values() for client in ids} == set(range(12))


def test_adversaries_do_not_break_the_choice():
    run = run_of(
        TWO,
        Auto(),
        rounds=8,
        evaluate_every=8,
        adversary=Adversary(kind="sign_flip", share=0.1, lies=("losses", "scores")),
        engine="stacked",
    )
    assert {client for ids in served(run).values() for client in ids} == set(range(12))
    assert run.summary["accuracy"]["mean"] > 0.6
