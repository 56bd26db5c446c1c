"""Metrics for Prometheus: what a program that collects them reads, and what Grafana's dashboard asks for."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedclade import DifferentialPrivacy, MissingExtraError
from fedclade.core import LeftOut, RunError
from fedclade.runs import RoundRecord
from fedclade.trackers import PrometheusExporter
from fedclade.trackers.prometheus import MOST_REASONS, OTHER
from tests.trackers.runs import CONFIG, round_record, run_with

MONITORING = Path(__file__).parents[2] / "containers" / "monitoring"
COSTS = {
    "clients_trained": 3,
    "clients_present": 5,
    "bytes_up": 100,
    "bytes_down": 200,
    "seconds_train": 1.5,
    "seconds_evaluate": 0.5,
    "seconds_server": 0.25,
}

Samples = dict[tuple[str, ...], float]


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    with PrometheusExporter(0) as started:
        yield started


def read(exporter: PrometheusExporter) -> Samples:
    """Read the metrics as Prometheus does: by name and values of labels."""
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as reply:
        text = reply.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def record(number: int, *left_out: dict[int, str], **metrics: Any) -> RoundRecord:
    events = tuple(LeftOut(0, "train", clients) for clients in left_out)
    made = round_record(number, **{**COSTS, "accuracy_mean": None, **metrics})
    return replace(made, events=events, config={**CONFIG, "rounds": 7})


def test_numbers_that_are_not_known_before_round_1_are_nan_and_counters_are_zero(exporter):
    samples = read(exporter)
    for name in ("round", "connected_clients", "privacy_epsilon"):
        assert math.isnan(samples[f"fedclade_{name}",])
    assert samples["fedclade_phase_seconds_total", "train"] == 0
    assert samples["fedclade_traffic_bytes_total", "up"] == 0
    assert samples["process_resident_memory_bytes",] > 1e6
    assert samples["fedclade_run_state", "running"] == 1


def test_every_round_is_counted(exporter):
    exporter.on_round(record(4, {1: "no reply within 3 s"}, accuracy_mean=0.5))
    exporter.on_round(record(5, {1: "no reply within 4 s", 2: "refused"}, clients_trained=2))
    samples = read(exporter)
    assert samples["fedclade_round",] == 5
    assert samples["fedclade_rounds_planned",] == 7
    assert samples["fedclade_rounds_total",] == 2
    assert samples["fedclade_connected_clients",] == 5
    assert samples["fedclade_replies_total",] == 5
    assert samples["fedclade_left_out_total", "no reply within # s"] == 2
    assert samples["fedclade_left_out_total", "refused"] == 1
    assert samples["fedclade_traffic_bytes_total", "down"] == 400
    assert samples["fedclade_phase_seconds_total", "evaluate"] == 1.0
    assert samples["fedclade_score", "accuracy", "mean"] == 0.5, "of the last evaluation"
    assert ("fedclade_run_info", "cfl", "tiny") in {key[:3] for key in samples}


def test_clients_cannot_make_any_number_of_time_series(exporter):
    told = {client: "x" * client for client in range(1, 3 * MOST_REASONS)}
    exporter.on_round(record(1, told))
    reasons = {
        key[1]: n for key, n in read(exporter).items() if key[0] == "fedclade_left_out_total"
    }
    assert len(reasons) == MOST_REASONS + 1
    assert sum(reasons.values()) == len(told)
    assert reasons[OTHER] == len(told) - MOST_REASONS
    exporter.on_round(record(2, {1: "y" * 1000}))
    assert max(map(len, reasons)) <= 100


def test_a_run_is_followed_to_its_end(exporter):
    run = run_with(exporter)
    samples = read(exporter)
    assert samples["fedclade_round",] == 4
    assert samples["fedclade_clusters",] == 2
    assert samples["fedclade_traffic_bytes_total", "up"] == run.summary["bytes_up"]
    assert samples["fedclade_score", "accuracy", "mean"] == run.summary["accuracy"]["mean"]
    assert samples["fedclade_run_state", "finished"] == 1
    assert math.isnan(samples["fedclade_privacy_epsilon",])


def test_the_spent_privacy_budget_is_that_of_the_summary(exporter):
    run = run_with(exporter, privacy=DifferentialPrivacy(clip_norm=1.0, noise_multiplier=2.0))
    samples = read(exporter)
    assert samples["fedclade_privacy_epsilon",] == run.summary["privacy"]["epsilon"] > 0
    assert samples["fedclade_privacy_delta",] == run.summary["privacy"]["delta"]


def test_a_port_that_is_in_use_and_an_address_of_another_machine_are_errors(exporter):
    with pytest.raises(
        RunError,
        match=rf"cannot be served on 127\.0\.0\.1:{exporter.port}: .*; choose another port in network",
    ):
        PrometheusExporter(exporter.port)
    with pytest.raises(
        RunError, match=r"192\.0\.2\.1:0: .*another address in network\.metrics_address"
    ):
        PrometheusExporter(0, "192.0.2.1")
    with pytest.raises(RunError, match=r"127\.0\.0\.1:65536: .*choose another port"):
        PrometheusExporter(65536)


def test_the_port_is_free_after_it_is_closed(exporter):
    exporter.close()
    with socket.create_server(("127.0.0.1", exporter.port)):
        pass


def test_without_the_client_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        MissingExtraError,
        match=r"network\.metrics needs .*'prometheus-client'.*fedclade\[monitoring\]",
    ):
        PrometheusExporter(0)


DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana/fedclade.json").read_text())
METRIC = re.compile(r"\b(?:fedclade|process)_\w+")


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_of_grafanas_dashboard_exists_and_every_metric_is_on_it(exporter):
    exporter.on_round(record(1, {1: "refused"}, accuracy_mean=0.5))
    exist = {key[0] for key in read(exporter)}
    asked = {name for text in expressions() for name in METRIC.findall(text)}
    variables = {
        name
        for each in DASHBOARD["templating"]["list"]
        for name in METRIC.findall(each.get("definition", ""))
    }
    assert asked | variables <= exist
    ours = {
        name for name in exist if name.startswith("fedclade_") and not name.endswith("_created")
    }
    assert ours - asked == {"fedclade_run_info", "fedclade_run_state", "fedclade_privacy_delta"}


def test_grafanas_dashboard_has_the_form_that_grafana_reads():
    assert DASHBOARD["uid"] == "fedclade"
    assert DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, "Grafana's grid has 24 columns"
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, f"{panel['title']} covers another panel"
        taken |= cells
        assert [target["refId"] for target in panel["targets"]] == ["A", "B"][
            : len(panel["targets"])
        ]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]
    for text in expressions():
        assert text.count("(") == text.count(")")
        assert text.count('{instance="$instance"}') == len(METRIC.findall(text))
