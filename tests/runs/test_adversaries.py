"""Runs with adversaries: who they are, what they change, and how honest clients and they are scored apart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedclade import (
    CFL,
    IFCA,
    Adversary,
    Aggregation,
    ConfigError,
    DifferentialPrivacy,
    Faults,
    FlexCFL,
    LocalTraining,
    Run,
    Signature,
    load_federation,
    simulate,
)
from fedclade.channel.adversary import KINDS
from fedclade.config import check_config
from fedclade.data import StatisticsQuery
from fedclade.runs.adversaries import Adversaries
from fedclade.tasks import Task
from tests.properties.test_resume import bytes_of
from tests.tiny import federation_of, perceptron, renamed, task_federation

TRUTH = [0, 0, 0, 0, 1, 1, 1, 1]
FEDERATION = federation_of(TRUTH)
IMAGES = load_federation("digits", clients=6, samples_per_client=60)
FREE = Aggregation(largest_weight=1e9, largest_norm=1e9, clip_above=1e9)
TASK = Task().of(FEDERATION.pool.schema)
SPLITS = CFL(eps2=1e-3, split_rounds=(2, 3))


def run(adversary, algorithm=SPLITS, federation=FEDERATION, **settings):
    model = "mclr" if federation is IMAGES else lambda seed: perceptron(seed)
    settings = {
        "rounds": 3,
        "engine": "loop",
        "local": LocalTraining(batch_size=10, lr=0.2),
        "seed": 1,
    } | settings
    return simulate(algorithm, model, federation, adversary=adversary, **settings)


def models(found) -> list[torch.Tensor]:
    return [node.model for node in found.tree.nodes]


def same(one, other) -> bool:
    """Whether two runs have come to the same clusters and models, bit for bit."""
    alike = [node.members for node in one.tree.nodes] == [node.members for node in other.tree.nodes]
    return alike and all(map(torch.equal, models(one), models(other)))


def adversary(kind: str, **options) -> Adversary:
    return Adversary(**{"kind": kind, "share": 0.25, **options})


def data_of(kind: str):
    return IMAGES if kind == "backdoor" else FEDERATION


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.25, 2), (0.3, 2), (0.5, 4)])
def test_a_share_of_all_clients_is_drawn(share, count):
    liars = Adversaries.drawn(adversary("ipm", share=share), FEDERATION, TASK, 0).lying.liars
    assert len(liars) == count
    assert (
        liars
        == Adversaries.drawn(adversary("sign_flip", share=share), FEDERATION, TASK, 0).lying.liars
    )
    drawn = {
        Adversaries.drawn(adversary("ipm", share=share), FEDERATION, TASK, seed).lying.liars
        for seed in range(9)
    }
    assert len(drawn) > 1


def test_a_share_of_one_true_cluster_is_drawn():
    for share, count in ((0.5, 2), (1.0, 4)):
        liars = Adversaries.drawn(
            adversary("ipm", share=share, cluster=1), FEDERATION, TASK, 0
        ).lying.liars
        assert len(liars) == count
        assert liars <= {4, 5, 6, 7}


def test_without_a_share_there_are_none():
    assert Adversaries.drawn(None, FEDERATION, TASK, 0) is None
    assert Adversaries.drawn(Adversary(kind="ipm"), FEDERATION, TASK, 0) is None
    plain = run(None)
    assert same(plain, run(Adversary(kind="ipm")))
    assert "adversary" not in plain.summary
    assert not any("honest" in column for column in plain.metric_rows[0])


@pytest.mark.parametrize("kind", KINDS)
def test_until_their_round_a_run_is_that_of_honest_clients(kind):
    """But for sybils, which are not there, and so for limits, which hold where clients may lie."""
    of, free = data_of(kind), Aggregation(largest_weight=1e9, largest_norm=1e9, clip_above=1e9)
    honest = run(None, "fedavg", of, rounds=2, aggregate=free)
    assert same(
        run(adversary(kind, from_round=3), "fedavg", of, rounds=2, aggregate=free), honest
    ) == (kind != "sybil")
    assert not same(
        run(adversary(kind, from_round=2), "fedavg", of, rounds=2, aggregate=free), honest
    )


@pytest.mark.parametrize(
    "kind", ["sign_flip", "gaussian", "minmax", "copy", "label_flip", "false_size", "sybil"]
)
def test_renaming_clients_changes_names_alone(kind):
    new = {client: (client + 3) % 8 for client in FEDERATION.ids}
    one, other = (
        run(adversary(kind), federation=of, rounds=2)
        for of in (FEDERATION, renamed(FEDERATION, new))
    )
    assert other.summary["adversary"]["ids"] == sorted(
        new[client] for client in one.summary["adversary"]["ids"]
    )
    clusters = [{frozenset(of.get(c, c) for c in leaf.members) for leaf in found.tree.leaves}
                for found, of in ((one, new), (other, {}))]  # fmt: skip
    assert clusters[0] == clusters[1]
    torch.testing.assert_close(models(one)[0], models(other)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gaussian", "copy", "label_flip", "backdoor", "sybil", "alie"])
def test_a_run_that_stops_ends_in_the_same_bytes(kind, tmp_path):
    settings = {"federation": data_of(kind), "rounds": 4}
    liar = adversary(kind, from_round=2, sleeper=kind in ("gaussian", "label_flip"))
    run(liar, folder=tmp_path / "whole", **settings)
    for _ in range(3):
        with pytest.raises(Exception, match="interrupted after round"):
            run(liar, folder=tmp_path / "resumed", stop=lambda: True, **settings)
    run(liar, folder=tmp_path / "resumed", **settings)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "resumed")


@pytest.mark.parametrize("kind", ["sign_flip", "minmax", "label_flip", "backdoor", "false_size"])
@pytest.mark.parametrize("engine", ["stacked", "workers", "vmap"])
def test_every_engine_comes_to_the_same(kind, engine):
    one, other = (
        run(adversary(kind), federation=data_of(kind), engine=each, rounds=2)
        for each in ("loop", engine)
    )
    assert [node.members for node in one.tree.nodes] == [node.members for node in other.tree.nodes]
    for mine, theirs in zip(models(one), models(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sign_flip", "label_flip", "gaussian", "false_size"])
def test_a_stream_comes_to_the_same(kind):
    settings = {"signature": Signature(kind="projected", dim=16)}
    one, other = (run(adversary(kind), stream=stream, **settings) for stream in (False, True))
    assert [node.members for node in one.tree.nodes] == [node.members for node in other.tree.nodes]
    torch.testing.assert_close(models(one)[-1], models(other)[-1], rtol=1e-4, atol=1e-5)


def test_who_must_see_all_updates_is_never_in_a_stream():
    with pytest.raises(
        ConfigError, match="stream should be false or 'auto' with adversaries of kind 'minmax'"
    ):
        run(adversary("minmax"), stream=True, signature=Signature(kind="projected", dim=16))
    found = run(adversary("minmax"), "fedavg", memory=10**5)
    assert found.config["stream"] is False
    assert run(adversary("sign_flip"), "fedavg", memory=10**4).config["stream"] is True


@pytest.mark.parametrize("kind", ["gaussian", "alie", "label_flip", "sybil"])
def test_lies_go_with_all_that_lies_between_clients_and_server(kind):
    """A permutation changes nothing but the order of entries, also of lies."""
    between = {
        "privacy": DifferentialPrivacy(clip_norm=1.0, noise_multiplier=0.01),
        "faults": Faults(dropout=0.1),
    }
    one, other = (
        run(adversary(kind), permute=permute, rounds=2, **between) for permute in (False, True)
    )
    assert [node.members for node in one.tree.nodes] == [node.members for node in other.tree.nodes]
    torch.testing.assert_close(models(one)[-1], models(other)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    ["rcfl", "ifca", "fedem", "fedrc", "pacfl", "feddrift", "fedper", "ditto", "fedsoft"],
)
@pytest.mark.parametrize("kind", ["label_flip", "gaussian"])
def test_methods_of_every_kind_run_with_liars(algorithm, kind):
    found = run(adversary(kind), algorithm, rounds=2)
    assert found.summary["adversary"]["kind"] == kind
    assert not same(found, run(None, algorithm, rounds=2))


def test_adversaries_that_poison_their_data_choose_by_it():
    """IFCA's clients take the model of least loss on their data: flipped, another one."""
    federation = federation_of([0] * 6)

    def chosen(liars):
        found = run(
            liars,
            IFCA(clusters=2),
            federation,
            rounds=4,
            seed=5,
            local=LocalTraining(epochs=4, lr=0.3),
        )
        return found, {client: found.tree.leaf_of[client] for client in federation.ids}

    (found, lying), (_, honest) = chosen(adversary("label_flip", share=0.4)), chosen(None)
    liars = set(found.summary["adversary"]["ids"])
    others = set(federation.ids) - liars
    assert {lying[client] for client in liars}.isdisjoint({lying[client] for client in others})
    assert not {honest[client] for client in liars}.isdisjoint(
        {honest[client] for client in others}
    )


def test_a_sleeper_wakes_when_the_first_cluster_has_gone_apart():
    awake = run(adversary("sign_flip", sleeper=True), rounds=2)
    assert same(awake, run(adversary("sign_flip", from_round=9), rounds=2)), (
        "the split is at the end of round 2"
    )
    assert len(awake.tree.leaves) > 1
    later = run(adversary("sign_flip", sleeper=True), rounds=3)
    assert not same(later, run(adversary("sign_flip", from_round=9), rounds=3))
    assert same(later, run(adversary("sign_flip", from_round=3), rounds=3))


def test_sybils_arrive_together():
    found = run(adversary("sybil", from_round=3), "fedavg", rounds=3)
    assert [row["clients_trained"] for row in found.metric_rows] == [6, 6, 8]


def test_a_false_size_takes_the_mean_unless_weights_are_limited():
    """Eight clients of 24 examples: the one that claims 10⁹ is all that is left of the mean."""
    free = Aggregation(largest_weight=1e12, largest_norm=1e9, clip_above=1e9)
    liar = adversary("false_size", share=0.1, cluster=1)
    found, alone = run(liar, "fedavg", rounds=1, aggregate=free), run(None, "local", rounds=1)
    (client,) = found.summary["adversary"]["ids"]
    own = alone.kept[client]["model"]
    torch.testing.assert_close(models(found)[0], own, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(models(run(liar, "fedavg", rounds=1))[0], own, atol=1e-3)


def test_the_summary_scores_honest_clients_apart(tmp_path):
    found = run(adversary("sign_flip"), folder=tmp_path)
    told, last = found.summary["adversary"], [row for row in found.client_rows if row["round"] == 3]
    liars = set(told["ids"])
    honest = [row["accuracy"] for row in last if row["client"] not in liars]
    assert told["scores"]["accuracy"]["honest"] == pytest.approx(sum(honest) / 6)
    assert told["scores"]["accuracy"]["honest_worst10"] == min(honest)
    assert told["scores"]["accuracy"]["adversaries"] == pytest.approx(
        sum(row["accuracy"] for row in last if row["client"] in liars) / 2
    )
    both = [
        leaf
        for leaf in found.tree.leaves
        if liars & set(leaf.members) and set(leaf.members) - liars
    ]
    alone = [leaf for leaf in found.tree.leaves if leaf.members and liars >= set(leaf.members)]
    assert told["clusters"] == {
        "of_adversaries": len(alone),
        "of_both": len(both),
        "adversaries_with_honest": sum(len(liars & set(leaf.members)) for leaf in both),
    }
    assert told["attack_success"] is None
    assert found.metric_rows[-1]["accuracy_honest"] == pytest.approx(
        told["scores"]["accuracy"]["honest"]
    )
    assert found.metric_rows[-1]["ari_honest"] == told["ari_honest"]
    assert Run.load(tmp_path).summary["adversary"] == json.loads(json.dumps(told))


def test_the_recovery_of_honest_clients_does_not_count_adversaries():
    found = run(adversary("sign_flip", share=0.13), "oracle")
    assert found.summary["adversary"]["ari_honest"] == 1.0


def test_a_backdoor_succeeds_where_the_mean_is_replaced_and_not_where_it_is_not_there():
    free = Aggregation(largest_weight=1e9, largest_norm=1e9, clip_above=1e9)
    spec = LocalTraining(epochs=5, batch_size=10, lr=0.1)
    settings = {"algorithm": "fedavg", "federation": IMAGES, "rounds": 4, "local": spec}
    liar = adversary("backdoor", target=3, patch=3, poisoned=0.5)
    success = run(liar, aggregate=free, **settings).summary["adversary"]["attack_success"]
    asleep = run(adversary("backdoor", target=3, from_round=9), aggregate=free, **settings)
    assert success > 0.8
    assert asleep.summary["adversary"]["attack_success"] < 0.5
    assert run(liar, **settings).summary["adversary"]["attack_success"] > 0.5, (
        "a bound of 5 times is no defence"
    )


def test_a_backdoor_is_boosted_by_the_clients_over_the_adversaries():
    """One of 6 clients: by default its update counts 6 times, so that the mean of 6 has all of it."""
    free = Aggregation(largest_weight=1e9, largest_norm=1e9, clip_above=1e9)
    settings = {"algorithm": "fedavg", "federation": IMAGES, "rounds": 1, "aggregate": free}
    plain, boosted = (
        models(run(adversary("backdoor", share=0.1, factor=factor), **settings))[0]
        for factor in (0.0, None)
    )
    once = models(run(adversary("backdoor", share=0.1, factor=1.0), **settings))[0]
    torch.testing.assert_close(boosted - plain, 6 * (once - plain), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("adversary", "federation", "told"),
    [
        (
            adversary("ipm", share=1.0),
            FEDERATION,
            r"adversary.share should be smaller, so that at least one of the 8 clients is honest, got 1.0",
        ),
        (
            adversary("ipm", cluster=5),
            FEDERATION,
            r"adversary.cluster should be one of the true clusters, \[0, 1\], got 5",
        ),
        (adversary("backdoor"), FEDERATION, "needs images with labels"),
        (adversary("label_flip"), task_federation("regression", [0, 0]), "needs labels"),
    ],
)
def test_adversaries_that_cannot_be_are_named(adversary, federation, told):
    with pytest.raises(ConfigError, match=told):
        Adversaries.drawn(adversary, federation, TASK, 0)


def test_adversaries_of_a_cluster_need_true_clusters():
    unknown = replace(FEDERATION, true_clusters=None)
    with pytest.raises(
        ConfigError,
        match=r"adversary\.cluster should be left out, since the true clusters .* are not known, got 1",
    ):
        Adversaries.drawn(adversary("ipm", cluster=1), unknown, TASK, 0)


def test_a_backdoor_is_measured_by_accuracy():
    with pytest.raises(
        ConfigError,
        match=r"task.metrics should be a list with 'accuracy', the metric that measures .* backdoor, got",
    ):
        run(adversary("backdoor"), "fedavg", IMAGES, task=Task(metrics=("f1",)))


@pytest.mark.parametrize(("from_round", "is_poisoned"), [(1, True), (2, False)])
def test_balanced_weights_count_poisoned_labels_from_the_first_round_on(from_round, is_poisoned):
    liars = Adversaries.drawn(adversary("label_flip", from_round=from_round), FEDERATION, TASK, 0)
    counted = liars.counted(StatisticsQuery(FEDERATION.ids, labels=4)).tolist()
    expected = [0] * 4
    for client in FEDERATION.ids:
        flips = is_poisoned and client in liars.lying.liars
        for label in FEDERATION.examples(client, "train")[1].tolist():
            expected[3 - label if flips else label] += 1
    assert counted == expected
    balanced = {"task": Task(class_weights="balanced"), "rounds": 1}
    found = run(adversary("label_flip", from_round=from_round), "fedavg", **balanced)
    if not is_poisoned:
        honest = run(None, "fedavg", aggregate=FREE, **balanced)
        assert same(
            run(adversary("label_flip", from_round=2), "fedavg", aggregate=FREE, **balanced), honest
        )
    assert found.summary["adversary"]["kind"] == "label_flip"


@pytest.mark.parametrize("lie", ["losses", "subspaces", "descriptors", "shifts"])
def test_false_statements_end_in_the_same_bytes_after_a_stop(lie, tmp_path):
    algorithm = {
        "losses": "ifca",
        "subspaces": "pacfl",
        "descriptors": "flux",
        "shifts": FlexCFL(groups=2),
    }[lie]
    liar = Adversary(lies=lie, share=0.25, from_round=1 if lie == "subspaces" else 2)
    run(liar, algorithm, folder=tmp_path / "whole")
    for _ in range(2):
        with pytest.raises(Exception, match="interrupted after round"):
            run(liar, algorithm, folder=tmp_path / "resumed", stop=lambda: True)
    run(liar, algorithm, folder=tmp_path / "resumed")
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "resumed")
    assert Run.load(tmp_path / "whole").summary["adversary"]["lies"] == [lie]


def test_a_config_names_false_statements():
    config = check_config({"adversary": {"lies": ["losses", "shifts"], "share": 0.2}})
    assert config.adversary == Adversary(lies=("losses", "shifts"), share=0.2)
    assert check_config(config.as_dict()) == config
    assert (
        "lies"
        not in check_config({"adversary": {"kind": "ipm", "share": 0.2}}).as_dict()["adversary"]
    )
    with pytest.raises(
        ConfigError, match=r"unknown adversary\.lies: 'loses'; did you mean 'losses'"
    ):
        check_config({"adversary": {"lies": ["loses"], "share": 0.2}})


def test_a_config_names_adversaries_and_leaves_them_out_without():
    config = check_config({"adversary": {"kind": "alie", "share": 0.2, "z": 1.5}})
    assert config.adversary == Adversary(kind="alie", share=0.2, z=1.5)
    assert config.as_dict()["adversary"]["z"] == 1.5
    assert "adversary" not in check_config({}).as_dict()
    with pytest.raises(
        ConfigError, match=r"unknown key of \[adversary\]: 'shares'; did you mean 'share'"
    ):
        check_config({"adversary": {"shares": 0.2}})
    with pytest.raises(
        ConfigError, match="stream should be false or 'auto' with adversaries of kind 'ipm'"
    ):
        check_config(
            {
                "stream": True,
                "adversary": {"kind": "ipm", "share": 0.2},
                "signature": {"kind": "projected"},
            }
        )
