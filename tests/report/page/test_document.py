"""The page as a file: whole, small, quiet, and safe from what users call their clients."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from fedclade.core.errors import MissingExtraError, RunError
from fedclade.core.tree import ParameterTree
from fedclade.report.colours import palette
from fedclade.report.page import (
    Page,
    RunView,
    comparison_page,
    page_html,
    run_page,
    section,
    state_json,
    write_page,
)
from fedclade.report.page.section import as_json, script_json
from fedclade.runs.store.run import Run
from fedclade.runs.store.tree_files import SimilarityMatrix
from fedclade.tasks.metrics import spread
from tests.report.conftest import summary

EVIL = "</script><img src=x onerror=alert(1)>%{x}"


def own_parts(html: str) -> str:
    """Return a page without Plotly's script, which has tags and addresses of its own."""
    script = section._plotly_script()
    assert html.count(script) == 1, "one copy of Plotly"
    return html.replace(script, "")


def figures_in(html: str) -> dict:
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL
    )
    assert found
    return json.loads(found[1])


def coloured(value):
    """Put colours where a page has their names, as its script does."""
    if isinstance(value, str) and value.startswith("@"):
        name, _, opacity = value[1:].partition("/")
        colour = palette(night=False)[name]
        return f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:], 16)},{opacity or 1})"
    if isinstance(value, dict):
        return {key: coloured(entry) for key, entry in value.items()}
    return [coloured(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.fixture
def everything(make_run) -> Run:
    """A run that every section has something to show of, with clients called by an evil name."""
    run = make_run([(2, 0)], truth=[0, 0, 1, 1])
    check = {"p_value": 0.1, "level": 0.01, "gain": 0.5, "gain_before": 0.1, "gamma": None}
    step = {
        "metric": "l2",
        "linkage": "ward",
        "threshold": 1.5,
        "sizes": [2, 2],
        "clients": [0, 1, 2, 3],
    }
    events = [
        *run.events,
        {
            "round": 2,
            "kind": "clustered",
            "node": 0,
            **step,
            "merges": [[0, 1, 1.0], [2, 3, 1.2], [4, 5, 3.0]],
        },
        {"round": 3, "kind": "checked", "node": 0, "clusters": [[0, 1], [2, 3]], **check},
        {"round": 3, "kind": "left_out", "node": 0, "query": "train", "clients": {"0": EVIL}},
    ]
    clients = [row | {"name": EVIL} for row in run.client_rows]
    metrics = [
        {
            "round": n,
            "accuracy_mean": 0.5,
            "clusters": 1,
            "ari": 0.5,
            "bytes_up": 1,
            "bytes_down": 1,
        }
        for n in (1, 2)
    ]
    return replace(
        run,
        events=events,
        client_rows=clients,
        metric_rows=metrics,
        config={"data": {"name": EVIL}},
    )


@pytest.fixture
def pages(everything: Run) -> dict[str, Page]:
    row = {"name": EVIL, "path": [0], "fits": True, "margin": None}
    row |= dict.fromkeys(("accuracy", "accuracy_root", "accuracy_own", "accuracy_fine_tuned"), 0.5)
    newcomers = {
        "summary": {"newcomers": 1, "fit_nowhere": 0, "assignment_accuracy": None, **row},
        "newcomers": [row],
    }
    one = RunView(everything, everything, EVIL, newcomers, Path(EVIL))
    named = [RunView(everything, folder=Path(f"{EVIL}{i}")) for i in range(3)]
    return {"one": run_page(one), "several": comparison_page(named, Path())}


def test_plotly_knows_all_that_figures_are_made_of(pages: dict[str, Page]):
    seen = [name for page in pages.values() for name in page.figures]
    assert {name.split("-")[0] for name in seen} == {
        *(
            "scores",
            "similarity",
            "dendrogram",
            "flow",
            "clients",
            "norms",
            "checks",
            "faults",
            "newcomers",
        ),
        *("clusters", "traffic"),
    }
    for page in pages.values():
        for figure in page.figures.values():
            # raises a ValueError for what Plotly does not know
            go.Figure(coloured(as_json(figure)))


@pytest.mark.parametrize("name", ["one", "several"])
def test_names_are_shown_and_never_run(pages: dict[str, Page], name: str):
    html = own_parts(page_html(pages[name]))
    assert "onerror=alert" in html, "the name is there"
    assert "<img" not in html
    # theme, figures, Plotly, the page's own
    assert html.count("<script") == html.count("</script>") == 4
    texts = json.dumps(figures_in(html))
    assert "<img" not in texts, "Plotly takes some tags for itself"
    assert "%{x}%{x}" not in texts


@pytest.mark.parametrize("live", [False, True])
def test_a_page_needs_nothing_else(pages: dict[str, Page], live: bool):
    html = own_parts(page_html(pages["one"], live=live))
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:)?//""", html)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert policy[1].startswith("default-src 'none';")
    assert ("connect-src 'self'" in policy[1]) == live
    assert ("fetch(" in html) == live


def test_colours_of_figures_are_those_of_the_style_sheet(pages: dict[str, Page]):
    named = {
        name.split("/")[0]
        for page in pages.values()
        for name in re.findall(r'"@([^"]+)"', json.dumps(page.figures))
    }
    assert named <= set(palette(night=False)) == set(palette(night=True))


def test_every_section_has_an_id_of_its_own_and_all_ids_do(pages: dict[str, Page]):
    assert pages
    for page in pages.values():
        ids = re.findall(r'\bid="([^"]+)"', own_parts(page_html(page)))
        assert len(ids) == len(set(ids))


def test_what_a_live_page_is_told_is_what_a_whole_one_shows(pages: dict[str, Page]):
    state = json.loads(state_json(pages["one"]))
    html = own_parts(page_html(pages["one"]))
    for part in state["sections"]:
        assert part["html"].strip() in html
    assert as_json(state["figures"]) == figures_in(html)


def test_numbers_that_are_none_do_not_break_a_page(everything: Run):
    """Clients without a score are in no picture; an infinite score, of a model that diverged, is null in JSON."""
    first = everything.client_rows[0]["client"]
    for value, alike in ((float("nan"), False), (float("inf"), True)):
        rows = [
            row | {"accuracy": value} if row["client"] == first else row
            for row in everything.client_rows
        ]
        page = run_page(RunView(replace(everything, client_rows=rows)))
        drawn = figures_in(page_html(page))["clients-0"]["data"][-1]["y"]
        assert (None in drawn) is alike
        assert json.loads(state_json(page))["figures"]["clients-0"]["data"][-1]["y"] == drawn
    rows = [row | {"accuracy": float("nan")} for row in everything.client_rows]
    page = run_page(RunView(replace(everything, client_rows=rows)))
    assert "clients-0" not in figures_in(page_html(page))
    json.loads(state_json(page))


def test_json_in_a_script_cannot_end_it():
    text = script_json({"a": "</script>&<!--"})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script>&<!--"}


def large_run(clients: int, rounds: int, clusters: int) -> Run:
    """Return a run with all that a page shows, of many clients."""
    members = [list(range(k, clients, clusters)) for k in range(clusters)]
    tree = ParameterTree.star(members, torch.zeros(1))
    draw = np.random.default_rng(0)
    accuracy = draw.random((rounds, clients)).tolist()
    rows = [
        {
            "round": n,
            "client": c,
            "name": f"hospital-{c:05d}",
            "cluster": tree.leaf_of[c],
            "true_cluster": c % clusters,
        }
        | {"accuracy": accuracy[n - 1][c], "loss": 1.0, "served_by": tree.leaf_of[c], "n_train": 10}
        for n in range(1, rounds + 1)
        for c in range(clients)
    ]
    nodes = [
        {
            "round": n,
            "node": k,
            "mean_norm": 1.5,
            "max_norm": 2.5,
            "alpha_cross_max": 0.1,
            "separation_gap": 0.2,
        }
        for n in range(1, rounds + 1)
        for k in range(1, clusters + 1)
    ]
    alpha = draw.uniform(-1, 1, (clients, clients))
    merges = [[i + 1 if i else 0, clients + i - 1 if i else 1, 1.0 + i] for i in range(clients - 1)]
    step = {
        "metric": "l2",
        "linkage": "single",
        "threshold": 2.0,
        "clients": list(range(clients)),
        "merges": merges,
    }
    lost = {str(c): f"norm {c}.5 too large" for c in range(0, clients, 2)}
    events = [
        {"round": n, "kind": "left_out", "node": 0, "query": "train", "clients": lost}
        for n in range(1, rounds + 1)
    ]
    events.append(
        {"round": 1, "kind": "clustered", "node": 0, "sizes": [len(m) for m in members], **step}
    )
    found = {
        "found": clusters,
        "true": clusters,
        "ari": 1.0,
        "nmi": 1.0,
        "sizes": [len(m) for m in members],
    }
    told = summary(
        "fl_hc", rounds=rounds, clients=clients, clusters=found, accuracy=spread(accuracy[-1])
    )
    similarities = tuple(SimilarityMatrix(k, 1, tuple(range(clients)), alpha) for k in range(15))
    return Run(told, {}, tree, [], nodes, rows, events, similarities)


@pytest.mark.parametrize("clusters", [8, 1000])
def test_a_page_of_a_thousand_clients_stays_below_6_mb(clusters: int):
    page = run_page(RunView(large_run(1000, 20, clusters)))
    assert {"similarity", "dendrogram", "flow", "clients", "faults"} <= {
        each.id for each in page.sections
    }
    assert len(page_html(page).encode()) < 6e6


def test_a_page_is_written_whole_or_not_at_all(pages: dict[str, Page], tmp_path: Path):
    target = tmp_path / "report.html"
    assert write_page(pages["one"], target) == target
    first = target.read_bytes()
    assert first.endswith(b"</html>")
    write_page(pages["several"], target)
    assert target.read_bytes() != first
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(
        RunError, match=r"cannot write the report .*nowhere/report\.html: .*No such file"
    ):
        write_page(pages["one"], tmp_path / "nowhere" / "report.html")


@pytest.mark.parametrize(
    ("module", "package"), [("jinja2", "jinja2"), ("plotly.offline", "plotly")]
)
def test_without_what_draws_it_a_page_says_how_to_get_that(
    pages: dict[str, Page], monkeypatch: pytest.MonkeyPatch, module: str, package: str
):
    for cached in (section._environment, section._parts, section._plotly_script):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=rf"the report page needs .*'{package}'.*fedclade\[report\]"
    ):
        page_html(pages["one"])
