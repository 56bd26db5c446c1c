"""Clients whose data changes during a run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from tests.tiny import federation_of

from fedclade import ConfigError, DataError, load_federation
from fedclade.config import check_config
from fedclade.data import Federation, Stage, write_federation
from fedclade.data.drift import PATTERNS, Drift


def drifting(**drift: object) -> Federation:
    settings = {"clients": 10, "shift": "label_swap", "clusters": 4, "seed": 3, "newcomers": 3}
    return load_federation("digits", **settings, drift={"rounds": (3, 5), **drift})


def truth(federation: Federation, number: int) -> list[int]:
    return [*federation.in_round(number).true_clusters.values()]


def test_what_clients_hold_is_the_same_within_a_stage():
    federation = drifting()
    assert [federation.stage_in(number) for number in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert federation.in_round(1) is federation.in_round(2)
    assert federation.in_round(3) is not federation.in_round(2)
    assert federation.in_round(9).stages == ()
    assert [registry.true_clusters for _, registry in federation.roster.stages] == [
        federation.in_round(number).true_clusters for number in (3, 5)
    ]


def test_new_examples_are_parts_of_what_clients_had_at_first():
    federation, at_rest = drifting(), replace(drifting(examples="same"), stages=())
    assert federation.ids
    for client in federation.ids:
        parts = [federation.in_round(number).by_id[client].train for number in (1, 3, 5)]
        assert sorted(np.concatenate(parts)) == sorted(at_rest.by_id[client].train)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("share", "moved"), [(None, 5), (0.3, 3), (0.01, 1), (0.0, 0), (1.0, 10)])
def test_a_share_of_the_clients_moves_to_another_cluster(share, moved):
    federation = drifting(share=share, examples="same")
    for before, after in ((1, 3), (3, 5)):
        pairs = zip(truth(federation, before), truth(federation, after), strict=True)
        assert sum(one != other for one, other in pairs) == moved
    first, later = (federation.in_round(number).clients for number in (1, 3))
    assert sum(one is not other for one, other in zip(first, later, strict=True)) == moved


def test_clients_move_by_a_pattern():
    steps = range(2, 11)
    federation = drifting(pattern="B", rounds=tuple(steps), examples="same")
    assert [truth(federation, number) for number in range(1, 11)] == [
        list(row) for row in PATTERNS["B"][:10]
    ]
    assert truth(federation.newcomers, 2) == list(PATTERNS["B"][1][:3])
    assert truth(drifting(pattern=((0, 1), (1, 0), (1, 1))), 3) == [1, 0] * 5


@pytest.mark.parametrize("shift", ["label_swap", "rotation"])
def test_what_clients_accumulate_they_see_as_they_did(shift):
    settings = {
        "clients": 4,
        "shift": shift,
        "clusters": 4,
        "samples_per_client": 30,
        "validation_fraction": 0.2,
    }
    replaced, kept = (
        load_federation("digits", **settings, drift={"rounds": [3, 5], "kind": kind, "share": 1.0})
        for kind in ("replace", "accumulate")
    )

    def seen(federation: Federation, client: int, number: int, split: str) -> list[bytes]:
        inputs, targets = federation.in_round(number).examples(client, split)
        return [
            x.numpy().tobytes() + y.numpy().tobytes() for x, y in zip(inputs, targets, strict=True)
        ]

    for client in replaced.ids:
        parts = [seen(replaced, client, number, "train") for number in (1, 3, 5)]
        for stages, number in ((1, 1), (2, 3), (3, 5)):
            assert sorted(seen(kept, client, number, "train")) == sorted(chain(*parts[:stages]))
            assert sorted(seen(kept, client, number, "test")) == sorted(
                seen(replaced, client, number, "test")
            )
    assert kept.in_round(5).by_id[0].test is kept.in_round(5).by_id[0].test
    assert kept.in_round(1).true_clusters == replaced.in_round(1).true_clusters


def test_a_stage_may_be_tested_on_the_next():
    now, ahead = drifting(share=1.0), drifting(share=1.0, test="next")
    for before, after in ((1, 3), (3, 5), (5, 5)):
        for ours, theirs in zip(
            ahead.in_round(before).examples(4, "test"),
            now.in_round(after).examples(4, "test"),
            strict=True,
        ):
            assert sorted(map(repr, ours.tolist())) == sorted(map(repr, theirs.tolist()))
    moved = [client for client in now.ids if PATTERNS["A"][9][client] != PATTERNS["A"][10][client]]
    assert moved == []  # so the last row of this pattern tests as the one before


def test_clients_may_draw_their_cluster_anew():
    federation = drifting(share="anew", rounds=tuple(range(2, 42)), examples="same")
    drawn = [cluster for number in range(2, 42) for cluster in truth(federation, number)]
    assert np.bincount(drawn) == pytest.approx(100, abs=35)  # four standard deviations


def test_all_stages_may_be_tested_as_one_that_was_seen():
    federation, now = drifting(share="anew", test="seen"), drifting(share="anew")
    assert federation.ids
    for client in federation.ids:
        tests = [federation.in_round(number).by_id[client].test for number in (1, 3, 5)]
        assert tests[0] is tests[1] is tests[2]
        shown = sorted(federation.in_round(1).examples(client, "test")[1].tolist())
        assert shown in [
            sorted(now.in_round(number).examples(client, "test")[1].tolist())
            for number in (1, 3, 5)
        ]


def test_stages_follow_the_clients():
    federation = drifting()
    alone, some = federation.alone(4), federation.shard({2, 4})
    everybody = federation.join(federation.newcomers)
    for number in (1, 4, 5):
        mine = federation.in_round(number).by_id[4]
        assert alone.in_round(number).by_id[4] is mine
        assert some.in_round(number).by_id[4] is mine
        assert everybody.in_round(number).by_id[4] is mine
        assert (
            everybody.in_round(number).by_id[11] is federation.newcomers.in_round(number).by_id[11]
        )
    assert some.in_round(3).ids == (2, 4)
    assert everybody.in_round(3).true_clusters == {
        **federation.in_round(3).true_clusters,
        **federation.newcomers.in_round(3).true_clusters,
    }
    assert drifting().fingerprint == federation.fingerprint
    assert (
        len(
            {
                f.fingerprint
                for f in (federation, replace(federation, stages=()), drifting(rounds=(3, 6)))
            }
        )
        == 3
    )


def test_stages_have_the_clients_of_the_federation():
    federation = federation_of([0, 1])
    two = federation.clients
    with pytest.raises(DataError, match=re.escape("at least 2 and in ascending order, got [3, 3]")):
        replace(federation, stages=(Stage(3, two), Stage(3, two)))
    with pytest.raises(
        DataError,
        match="the stage from round 2 on should have the federation's clients, in the order",
    ):
        replace(federation, stages=(Stage(2, two[::-1]),))


@pytest.mark.parametrize(
    ("drift", "why"),
    [
        ({"rounds": [1]}, "one or more rounds of at least 2, in ascending order, got [1]"),
        ({"rounds": [5, 3]}, "in ascending order, got [5, 3]"),
        ({"kind": "swap"}, "kind of [data.drift] should be 'replace' or 'accumulate', got 'swap'"),
        ({"share": 2.0}, "drift.share should be in [0, 1], or 'anew', got 2.0"),
        ({"share": 0.5, "pattern": "A"}, "left out with a pattern"),
        ({"pattern": "G"}, "unknown pattern of drift: 'G'"),
        (
            {"pattern": [[0, 1]]},
            "the pattern of drift should have at least 3 rows, one for each time step, got 1",
        ),
        ({"pattern": [[0, 1], [2], [1, 1]]}, "rows of equal length"),
        ({"pattern": [[0, 1], [], [1, 1]]}, "rows of equal length"),
        ({"pattern": [[], [], []]}, "rows of equal length"),
        (
            {"pattern": [[0, 1], [1, 0], [0, -1]]},
            "with a concept number of at least 0 for each client",
        ),
        (
            {"pattern": [[-1, 1], [1, 0], [0, 1]]},
            "with a concept number of at least 0 for each client",
        ),
        ({"pattern": [[9], [0], [1]]}, "of 4 concepts, which is the number of clusters"),
        ({"round": [3]}, "unknown key of [data.drift]: 'round'"),
    ],
)
def test_a_drift_that_cannot_be_is_refused(drift, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        drifting(**drift)


def test_a_config_has_a_drift():
    data = {"name": "digits", "clients": 4, "shift": "rotation", "clusters": 2}
    config = check_config({"data": {**data, "drift": {"rounds": [2], "examples": "same"}}})
    assert [stage.first_round for stage in config.federation().stages] == [2]
    with pytest.raises(ConfigError, match=re.escape("rounds of [data.drift] should be a list")):
        check_config({"data": {**data, "drift": {"rounds": 2}}})


def test_too_few_examples_for_the_stages():
    with pytest.raises(
        ConfigError, match="training examples should be at least 3 for client 0, one for each stage"
    ):
        load_federation("digits", clients=2, samples_per_client=2, drift=Drift(rounds=(3, 5)))


def test_a_folder_holds_no_stages(tmp_path):
    with pytest.raises(DataError, match="a folder cannot store a federation whose data changes"):
        write_federation(drifting(), tmp_path / "folder")


def test_a_share_that_is_no_number_is_refused():
    with pytest.raises(
        ConfigError, match=r"drift.share should be in \[0, 1\], or 'anew', got 'half'"
    ):
        Drift(rounds=(2,), share="half")
