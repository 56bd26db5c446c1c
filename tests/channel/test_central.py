"""Central privacy: clipping, sums with noise, questions, randomized response."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade import (
    CFL,
    Adversary,
    Aggregation,
    ConfigError,
    FedAvg,
    LocalTraining,
    Oracle,
    simulate,
)
from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.channel import (
    Answering,
    CentralPrivacy,
    Channel,
    NoisySums,
    check_local,
    client_side,
    keyed_noise,
    mechanism_of,
    privatizing,
)
from fedclade.channel.accounting import Release, composed_epsilon, share_at_random
from fedclade.channel.privacy import DifferentialPrivacy, system_noise
from fedclade.channel.streaming import Streaming
from fedclade.config import check_config
from fedclade.core import (
    SENSITIVITY,
    Answer,
    Cells,
    Choice,
    ClientWork,
    Delta,
    Models,
    Moments,
    PrivateRelease,
    Round,
    TrainQuery,
)
from fedclade.runs import Backend
from tests.tiny import ScriptedClients, federation_of, linear

N, S, R = 12, 40, 8
ROUND = Round(3, LocalTraining(), seed=1)
PRIVACY = CentralPrivacy(
    clip_norm=0.5, noise_multiplier=2.0, signature_noise=4.0, signature_epsilon=2.0
)
KEYS = {client: client for client in range(N)}
EYE = torch.eye(R, 3, dtype=torch.float64)


def scripted() -> ScriptedClients:
    deltas = torch.randn(N, S, generator=torch.Generator().manual_seed(0))
    return ScriptedClients(dict(enumerate(deltas.tolist())))


class Counted(ScriptedClients):
    """Clients that count how often they are asked to train."""

    trained = 0

    def train(self, *args, **kwargs):
        self.trained += 1
        return super().train(*args, **kwargs)


def updates_of(clients: ScriptedClients) -> torch.Tensor:
    return clients.train(list(range(N)), torch.zeros(1, S), [0] * N, ROUND).required_deltas


def central(privacy=PRIVACY, noise=None, sampling=1.0) -> tuple[Channel, NoisySums]:
    noisy_sums = NoisySums(privacy, sampling)
    private, answering = (
        privatizing(privacy, dict.fromkeys(KEYS, 1), KEYS),
        Answering(privacy, noise or keyed_noise(KEYS)),
    )
    return Channel(
        scripted(), *client_side(private, answering=answering), Streaming(), noisy_sums
    ), noisy_sums


def train(clients, this_round=ROUND, groups=1):
    return clients.train(
        list(range(N)), torch.zeros(groups, S), [i % groups for i in range(N)], this_round
    )


def ask(clients, question, this_round=ROUND):
    models = Models(torch.zeros(1, S), [0] * N)
    work = ClientWork(reply=Answer(question))
    return clients.ask(TrainQuery(list(range(N)), models, this_round, work))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("clip_norm", 0.0, "greater than 0 and finite"),
        ("signature_noise", -1.0, "at least 0 and finite, or left out for noise_multiplier"),
        ("signature_epsilon", 0.0, "greater than 0 and less than 100"),
        ("signature_epsilon", 100.0, "greater than 0 and less than 100"),
    ],
)
def test_a_setting_out_of_range_is_named(name, value, rule):
    with pytest.raises(ConfigError, match=f"privacy.{name} should be {rule}, got {value}"):
        CentralPrivacy(**{"clip_norm": 1.0, name: value})


def test_what_a_section_says_is_one_model_of_privacy():
    assert mechanism_of({}) is None
    assert isinstance(mechanism_of({"clip_norm": 1.0}), DifferentialPrivacy)
    made = mechanism_of(
        {"model": "central", "clip_norm": 1.0, "signature_epsilon": 3.0, "signature_noise": None}
    )
    assert made == CentralPrivacy(clip_norm=1.0, signature_epsilon=3.0)
    for section, message in [
        ({"model": "both"}, "privacy.model should be 'local' or 'central', got 'both'"),
        (
            {"signature_noise": 1.0},
            'privacy.signature_noise should be left out unless privacy.model = "central", got 1.0',
        ),
        (
            {"signature_epsilon": 1.0},
            'privacy.signature_epsilon should be left out unless privacy.model = "central", got 1.0',
        ),
        (
            {"model": "central"},
            'privacy.clip_norm should be set if privacy.model = "central", got None',
        ),
        (
            {"model": "central", "clip_norm": 1.0, "level": "example"},
            "privacy.level should be client if privacy.model = \"central\", got 'example'",
        ),
        (
            {"model": "central", "clip_norm": 1.0, "permute": True},
            'privacy.permute should be false if privacy.model = "central", got True',
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            mechanism_of(section)


def test_a_network_refuses_central_privacy():
    assert check_local(None) is None
    with pytest.raises(
        ConfigError, match=r'privacy\.model = "central" works only in a simulation.*"local"'
    ):
        check_local(PRIVACY)


def test_the_server_gets_the_sum_of_clipped_updates_and_nothing_of_single_ones():
    exact = CentralPrivacy(clip_norm=0.5, signature_epsilon=1.0)
    clients, _ = central(exact)
    updates, raw = train(clients), updates_of(scripted()).double()
    clipped = raw * (0.5 / raw.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(
        updates.sums.groups[0].double(), clipped.sum(0), rtol=1e-5, atol=1e-6
    )
    assert updates.deltas is None
    assert updates.norms.isnan().all()
    assert updates.losses.isnan().all()
    assert updates.sizes.tolist() == [1.0] * N  # all count alike, however many examples they have


def test_the_noise_on_a_sum_has_standard_deviation_z_times_c_and_repeats():
    clients, noisy_sums = central()
    quiet, _ = central(CentralPrivacy(clip_norm=0.5))
    noise = torch.cat(
        [
            train(clients, replace(ROUND, number=n)).sums.groups - train(quiet).sums.groups
            for n in range(1, 101)
        ]
    )
    assert float(noise.std()) == pytest.approx(2.0 * 0.5, rel=0.05)
    assert abs(float(noise.mean())) < 0.06
    again = train(central()[0], replace(ROUND, number=1)).sums.groups
    assert torch.equal(again - train(quiet).sums.groups, noise[:1])
    assert noisy_sums.told()[0] == PrivateRelease(0, "updates", noise_multiplier=2.0)
    assert noisy_sums.told() == ()


def test_no_update_reaches_a_sink_before_it_is_clipped():
    sinks = []

    class Noting(ScriptedClients):
        def ask(self, query, sink=None):
            sinks.append(sink)
            return super().ask(query)

    clients = Channel(Noting(scripted().deltas), Answering(PRIVACY, keyed_noise(KEYS)))
    models = Models(torch.zeros(1, S), [0] * N)
    for reply in (Delta(), Answer(Moments(0, R))):
        query = TrainQuery(list(range(N)), models, ROUND, ClientWork(reply=reply))
        clients.ask(query, lambda _: None)
    assert sinks == [None, None]


def test_two_clusters_get_noise_of_their_own():
    quiet, _ = central(CentralPrivacy(clip_norm=0.5))
    one, other = train(central()[0], groups=2).sums.groups - train(quiet, groups=2).sums.groups
    assert float((one - other).norm()) > 1


def test_the_sum_of_sampled_clients_is_divided_by_how_many_were_expected():
    """So the mean of what came, 12 clients where 24 were expected, is half of it."""
    quiet = CentralPrivacy(clip_norm=0.5)
    plain = train(central(quiet)[0]).sums.groups
    clients, noisy_sums = central(quiet, sampling=0.25)
    noisy_sums.expected = dict.fromkeys(range(N), 24.0)
    sampled = train(clients)
    torch.testing.assert_close(sampled.sums.groups, plain / 2)
    assert noisy_sums.told()[0].sampling == 0.25


def test_what_is_not_covered_is_refused():
    clients, _ = central()
    for call in (
        lambda: clients.evaluate([0], torch.zeros(1, S), [0], "train"),
        lambda: clients.ask(SubspaceQuery([0], 1, False)),
        lambda: clients.ask(DescriptorQuery([0], torch.zeros(1, S), 1)),
        lambda: clients.ask(ShiftQuery([0], 1, 0.1, True)),
    ):
        with pytest.raises(ConfigError, match="clients with differential privacy do not reveal"):
            call()


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_replies_to_a_question_lie_at_most_the_square_root_of_two_apart(one, other):
    """The sensitivity that the noise is measured by; and none is longer than 1."""
    u = torch.stack(
        [torch.randn(S, generator=torch.Generator().manual_seed(seed)) for seed in (one, other)]
    )
    points = torch.nn.functional.normalize(
        torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), dim=1
    )
    for question in (Moments(0, R), Cells(0, R, EYE, points)):
        a, b = question.answered(question.signatures(u))
        assert float(a.norm()) <= 1 + 1e-9
        assert float((a - b).norm()) <= SENSITIVITY + 1e-9


def test_orthogonal_signatures_reach_that_distance():
    u = torch.eye(R, dtype=torch.float64)[:2]
    a, b = Moments(0, R).answered(u)
    assert float((a - b).norm()) == pytest.approx(SENSITIVITY)


def test_moments_are_the_outer_product():
    question = Moments(0, R)
    u = question.signatures(updates_of(scripted()))
    rows, columns = torch.triu_indices(R, R)
    matrix = torch.zeros(R, R, dtype=torch.float64)
    matrix[rows, columns] = question.answered(u).sum(0) / torch.where(
        rows == columns, 1.0, SENSITIVITY
    )
    torch.testing.assert_close(matrix.triu(), (u.T @ u).triu())


def test_the_sketch_is_scaled_to_length_one_and_public():
    question = Moments(5, R)
    u = question.signatures(updates_of(scripted()))
    torch.testing.assert_close(u.norm(dim=1), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(Moments(5, R).signatures(10 * updates_of(scripted())), u)
    assert not torch.equal(Moments(6, R).signatures(updates_of(scripted())), u)
    assert torch.equal(
        question.signatures(torch.zeros(1, S)), torch.zeros(1, R, dtype=torch.float64)
    )


def test_the_noise_on_sums_of_questions_is_measured_by_half_the_sensitivity():
    quiet, noisy = (central(p)[0] for p in (CentralPrivacy(clip_norm=0.5), PRIVACY))
    question = Moments(0, R)
    noise = torch.cat(
        [
            ask(noisy, question, replace(ROUND, number=n)).sums.groups
            - ask(quiet, question).sums.groups
            for n in range(1, 101)
        ]
    )
    assert float(noise.std()) == pytest.approx(4.0 * SENSITIVITY / 2, rel=0.05)


def test_clients_train_once_for_all_questions_of_a_round():
    script = Counted(scripted().deltas)
    clients = Channel(
        script, Answering(PRIVACY, keyed_noise(KEYS)), Streaming(), NoisySums(PRIVACY)
    )
    ask(clients, Moments(0, R))
    ask(clients, Choice(0, R, EYE, torch.eye(3, dtype=torch.float64)))
    assert script.trained == 1
    ask(clients, Moments(0, R), replace(ROUND, number=4))
    assert script.trained == 2


@given(st.floats(0.1, 20), st.integers(2, 50))
def test_randomized_response_has_a_likelihood_ratio_of_e_to_the_epsilon_exactly(epsilon, options):
    """The probabilities of all answers sum to 1; no answer tells two truths apart by a larger factor."""
    share = share_at_random(epsilon, options)
    truth, lie = 1 - share + share / options, share / options
    assert truth + (options - 1) * lie == pytest.approx(1)
    assert truth / lie == pytest.approx(math.exp(epsilon))


@pytest.mark.parametrize("noise", [keyed_noise(dict.fromkeys(range(N), 7)), system_noise])
def test_choices_are_told_by_randomized_response(noise):
    """Each of 3 options has the probability of the formula; both keyed noise and the system's."""
    centres = torch.eye(3, dtype=torch.float64)
    question = Choice(0, R, EYE, centres)
    truth = question.answered(question.signatures(updates_of(scripted())))
    counts = Counter[bool]()
    answering = Answering(PRIVACY, noise)
    for number in range(1, 251):
        told = answering._responded(truth, tuple(range(N)), 3, replace(ROUND, number=number))
        counts.update((told[:1] == truth[:1]).tolist())
    expected = math.exp(2) / (math.exp(2) + 2)
    spread = math.sqrt(expected * (1 - expected) / 250)
    assert counts[True] / 250 == pytest.approx(expected, abs=4 * spread)


def test_choices_repeat_in_a_simulation_and_are_the_truth_without_an_epsilon():
    question = Choice(0, R, EYE, torch.eye(3, dtype=torch.float64))
    truth = question.answered(question.signatures(updates_of(scripted())))
    once, again = (ask(central()[0], question) for _ in range(2))
    assert torch.equal(once.components, again.components)
    assert not torch.equal(once.components, truth)
    assert torch.equal(ask(central(CentralPrivacy(clip_norm=1.0))[0], question).components, truth)
    assert torch.equal(ask(central(privacy=None)[0], question).components, truth)


def test_fedavg_with_central_privacy_moves_by_the_mean_of_clipped_updates():
    """Clients of unlike sizes count alike; the summary says ε, and towards whom."""
    federation = federation_of([0] * 6, sizes=[10, 20, 30, 10, 20, 30])
    run = simulate(
        FedAvg(),
        linear(),
        federation,
        rounds=2,
        privacy=CentralPrivacy(clip_norm=0.1, noise_multiplier=3.0),
    )
    spent = run.summary["privacy"]
    assert spent["level"] == "client"
    assert spent["releases"] == 2
    assert (
        spent["epsilon"]
        == spent["epsilon_public"]
        == pytest.approx(composed_epsilon([Release(noise_multiplier=3.0)] * 2, 1e-5, sampled=False))
    )
    assert run.config["privacy"]["model"] == "central"
    assert all(row["max_norm"] is None for row in run.cluster_rows)
    quiet = simulate(
        FedAvg(), linear(), federation, rounds=1, privacy=CentralPrivacy(clip_norm=0.1)
    )
    assert float((quiet.tree.nodes[0].params - simulated_start(federation)).norm()) <= 0.1 + 1e-6
    assert quiet.summary["privacy"]["epsilon"] is None


def simulated_start(federation):
    return Backend.simulated_by(federation, linear(), FedAvg()).initial


def test_sampling_one_by_one_hides_who_was_sampled_from_the_public_alone():
    federation = federation_of([0] * 10)
    privacy = CentralPrivacy(clip_norm=0.1, noise_multiplier=3.0)
    run = simulate(FedAvg(), linear(), federation, rounds=4, client_fraction=0.3, privacy=privacy)
    spent = run.summary["privacy"]
    assert spent["epsilon_public"] < spent["epsilon"]
    sampled = [event["sampling"] for event in run.events if event["kind"] == "private_release"]
    assert sampled == [0.3] * 4
    # Poisson: not always as many
    assert len({row["clients_trained"] for row in run.metric_rows}) > 1


def test_a_cluster_of_which_nobody_was_drawn_moves_by_the_noise_alone():
    federation = federation_of([0, 0, 1, 1])
    privacy = CentralPrivacy(clip_norm=0.1, noise_multiplier=3.0)
    options = {
        "rounds": 1,
        "local": LocalTraining(batch_size=10),
        "client_fraction": 1e-6,
        "evaluate_clients": 1,
    }
    run = simulate(
        Oracle(federation.true_clusters), linear(), federation, privacy=privacy, **options
    )
    start = Backend.simulated_by(federation, linear(), FedAvg()).initial
    moves = [leaf.params - start for leaf in run.tree.leaves]
    assert not torch.equal(*moves)
    for moved in moves:  # z·C noise on the sum, over 2e-6 clients on average
        assert float(moved.std()) == pytest.approx(3.0 * 0.1 / 2e-6, rel=0.5)
    assert run.summary["privacy"]["releases"] == 1


def test_what_looks_at_single_updates_is_refused():
    privacy = CentralPrivacy(clip_norm=0.1)
    with pytest.raises(
        ConfigError,
        match="CFL needs the updates of single clients, but the server receives only sums",
    ):
        simulate(CFL(), linear(), federation_of([0, 0, 1, 1]), rounds=1, privacy=privacy)
    with pytest.raises(ConfigError, match="allows only sums of updates; set stream = true"):
        simulate(FedAvg(), linear(), federation_of([0, 0]), rounds=1, privacy=privacy, stream=False)
    with pytest.raises(ConfigError, match=r"privacy\.permute should be false with central privacy"):
        simulate(FedAvg(), linear(), federation_of([0, 0]), rounds=1, privacy=privacy, permute=True)
    with pytest.raises(ConfigError, match="allows only sums of updates; set stream = true"):
        train(Channel(scripted(), Answering(PRIVACY, keyed_noise(KEYS)), NoisySums(PRIVACY)))


def test_rules_and_limits_that_look_at_single_updates_are_refused():
    privacy, why = (
        CentralPrivacy(clip_norm=0.1),
        "rules and limits of .aggregate. need the updates of single clients",
    )
    for aggregation in (Aggregation(rule="median"), Aggregation(largest_norm=3.0)):
        with pytest.raises(ConfigError, match=why):
            simulate(
                FedAvg(),
                linear(),
                federation_of([0, 0, 0]),
                rounds=1,
                privacy=privacy,
                aggregate=aggregation,
            )


def test_adversaries_that_see_single_updates_are_refused_and_lies_of_others_are_clipped():
    privacy, federation = CentralPrivacy(clip_norm=0.1), federation_of([0] * 4)
    why = r"adversaries of kind 'ipm' need the single updates of other clients, which no party receives"
    with pytest.raises(ConfigError, match=why):
        simulate(
            *(FedAvg(), linear(), federation),
            **{"rounds": 1, "privacy": privacy, "adversary": Adversary(kind="ipm", share=0.5)},
        )
    section = {"model": "central", "clip_norm": 0.1}
    with pytest.raises(ConfigError, match=why):
        check_config({"privacy": section, "adversary": {"kind": "ipm", "share": 0.5}})
    honest, lied = (
        simulate(FedAvg(), linear(), federation, rounds=1, privacy=privacy, adversary=adversary)
        .tree.nodes[0]
        .params
        for adversary in (None, Adversary(kind="scaled", share=0.25, factor=1e6, size=10**6))
    )
    # the lie is as long as C, and counts once, as the truth does
    assert torch.allclose(honest, lied, atol=1e-6)
    flipped = Adversary(kind="sign_flip", share=0.25)
    other = (
        simulate(FedAvg(), linear(), federation, rounds=1, privacy=privacy, adversary=flipped)
        .tree.nodes[0]
        .params
    )
    assert 0.01 < float((honest - other).norm()) <= 0.1 * 2 / 4 + 1e-6


def test_the_oracle_trains_by_sums_of_its_clusters():
    federation = federation_of([0, 0, 0, 1, 1, 1])
    run = simulate(
        Oracle(federation.true_clusters),
        linear(),
        federation,
        rounds=2,
        privacy=CentralPrivacy(clip_norm=1.0),
    )
    assert run.summary["clusters"]["ari"] == 1.0


def test_a_choice_that_is_asked_for_again_is_told_again_and_not_drawn_anew():
    """Or two answers to one question would cost two times ε."""
    clients, _ = central()
    question = Choice(0, R, EYE, torch.eye(3, dtype=torch.float64))
    once = ask(clients, question).components
    assert torch.equal(ask(clients, question, replace(ROUND, query=5)).components, once)
    other = Choice(0, R, EYE, torch.eye(3, dtype=torch.float64).flip(0))
    assert not torch.equal(ask(clients, other, replace(ROUND, query=6)).components, once)
