"""Every page of the documentation works from its first block to its last, and leads to what there is."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import Context, RecordDict

from fedclade import ParameterTree, Run
from fedclade.config import check_config, read_config
from fedclade.flower import LocalGrid
from tests.docs.blocks import PAGES, ROOT, blocks_of, text_of
from tests.docs.story import Story, runs, tell
from tests.trackers.test_tensorboard import scalars

TELLING = {page: [block for block in blocks_of(page) if runs(block)] for page in PAGES}
QUICK = [page for page, blocks in TELLING.items() if any(not block.is_slow for block in blocks)]
SLOW = [page for page, blocks in TELLING.items() if any(block.is_slow for block in blocks)]
EXAMPLES = {
    "households": ("households-rcfl.html", "MAE"),
    "hospitals": ("hospitals-example/run/report.html", "AUROC"),
    "photographs": ("photographs.html", "accuracy"),
    "reviews": ("reviews.html", "accuracy"),
    "adapters": ("adapters.html", "perplexity"),
}
"""Of each example, the report it writes, and the metric that this names."""

FENCED = re.compile(r"^(`{3,})[^`][\s\S]*?^\1$", flags=re.MULTILINE)
"""A block of a page, whose links are those of another file."""

Told = Callable[..., Story]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Run a page once, for all that is to be said of it."""
    stories: dict[tuple[str, bool], Story] = {}

    def tell_once(page: str, *, slow: bool = False) -> Story:
        if (page, slow) not in stories:
            stories[page, slow] = tell(page, tmp_path_factory.mktemp("page"), slow=slow)
        return stories[page, slow]

    return tell_once


@pytest.mark.parametrize("page", QUICK)
def test_the_blocks_of_a_page_run(page: str, told: Told):
    told(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_all_blocks_of_a_page_run(page: str, told: Told):
    told(page, slow=True)


def test_the_python_of_the_readme_finds_the_four_clusters(told: Told):
    readme = told("README.md")
    clusters = readme.names["clustered"].summary["clusters"]
    assert (clusters["found"], clusters["true"], clusters["ari"]) == (4, 4, 1.0)
    assert Run.load(readme.folder / "runs/first").summary["rounds"] == 20


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_config_of_the_page_on_the_command_line_is_the_one_that_is_shipped():
    shipped = read_config(ROOT / "configs/cfl-mnist-label-swap.toml").as_dict()
    shown = check_config(tomllib.loads(text_of("docs/command-line.md", "toml"))).as_dict()
    without_target: dict[str, Any] = {"target": {"accuracy": None}}
    assert {**shown, **without_target} == {**shipped, **without_target}


def test_the_page_on_own_data_has_a_short_config_and_an_augmentation_that_flips(told: Told):
    config = next(b.text for b in blocks_of("docs/own-data.md") if b.language == "toml")
    assert check_config(tomllib.loads(config)).data["name"] == "hospitals"
    assert len([line for line in config.splitlines() if line]) < 10
    pictures = torch.arange(48.0).view(8, 1, 2, 3)
    assert torch.equal(told("docs/own-data.md").names["flip"](pictures).sort()[0], pictures)


def rows_of_clients(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "clients.parquet").to_pylist()


def test_the_model_of_the_page_on_the_tree_is_that_of_the_client(told: Told):
    page = told("docs/parameter-tree.md")
    run, model = page.names["run"], page.names["model"]
    tree: ParameterTree = run.tree
    loaded = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(loaded, tree.model_for(3))
    x, y = check_config(run.config).federation().examples(3, "test")
    said = rows_of_clients(page.folder / "runs/tree")[-20 + 3]
    assert said["client"] == 3
    assert float((model(x).argmax(1) == y).double().mean()) == pytest.approx(said["accuracy"])


def test_the_server_of_the_page_on_networks_finds_what_its_python_finds(
    told: Told, monkeypatch: pytest.MonkeyPatch
):
    page = told("docs/federation.md")
    monkeypatch.chdir(page.folder)
    page.names["server"](LocalGrid(page.names["nodes"]), Context(1, 0, {}, RecordDict(), {}))
    run = Run.load(page.folder / "runs/hospitals")
    assert run.tree.leaf_of == page.names["run"].tree.leaf_of
    assert set(run.tree.leaf_of) == {0, 1, 2, 3}
    assert [row["client"] for row in rows_of_clients(page.folder / "runs/hospitals")[-4:]] == [
        0,
        1,
        2,
        3,
    ]


def test_the_callback_of_the_page_on_trackers_hears_of_a_split_and_finishes_the_run(told: Told):
    split, end, stopped = told("docs/track.md").output.splitlines()
    assert split.startswith("round 3: 0 became {1: (")
    assert end == "finished after 3 rounds"
    assert stopped == "{'round': 3, 'by': 'Follow', 'why': 'on_round returned FINISH'}"


def test_the_quick_start_gets_to_a_report_in_under_ten_lines():
    install, *lines = next(
        b.text for b in blocks_of("docs/quick-start.md") if b.language == "bash"
    ).splitlines()
    assert install == 'pip install "fedclade[report]"'
    assert lines[-1].startswith("fedclade report ")
    assert len(lines) < 9


def test_the_config_of_the_quick_start_is_that_of_the_example():
    shipped = (ROOT / "src/fedclade/cli/examples/hospitals/hospitals.toml").read_text(
        encoding="utf-8"
    )
    assert shipped.endswith(text_of("docs/quick-start.md", "toml"))


@pytest.mark.slow
def test_the_quick_start_says_what_one_model_for_all_gets(told: Told):
    page = told("docs/quick-start.md", slow=True)
    assert (page.folder / "first/report.html").stat().st_size > 100_000
    one = Run.load(page.folder / "one-model").summary["accuracy"]["mean"]
    assert f"{100 * one:.1f} %" in (ROOT / "docs/quick-start.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/index.md", "docs/quick-start.md"])
def test_the_python_of_a_first_page_finds_the_four_clusters(page: str, told: Told):
    clusters = told(page).names["run"].summary["clusters"]
    assert (clusters["found"], clusters["true"], clusters["ari"]) == (4, 4, 1.0)


@pytest.mark.slow
def test_a_run_that_is_continued_goes_on_in_the_same_event_files(told: Told):
    events = scalars(told("docs/track.md", slow=True).folder / "tracked" / "tensorboard")
    assert [step for step, _ in events["clusters/found"]] == [*range(1, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_report_of_an_example_names_its_metric_and_no_other(name: str, told: Told):
    report, metric = EXAMPLES[name]
    html = (told("docs/examples.md", slow=True).folder / report).read_text(encoding="utf-8")
    body = re.sub(r"<script[\s\S]*?</script>", "", html).lower()
    assert metric.lower() in body
    if metric != "accuracy":
        assert "accuracy" not in body


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_on_its_page(name: str):
    assert len((ROOT / f"examples/{name}.py").read_text(encoding="utf-8").splitlines()) < 100
    shown = [block.text for block in blocks_of("docs/examples.md")]
    assert shown[shown.index(f"python examples/{name}.py\n") + 1].strip(), (
        "what it prints comes next"
    )


def test_every_file_that_a_page_links_to_exists_or_is_made_with_the_site(
    monkeypatch: pytest.MonkeyPatch,
):
    docs = ROOT / "docs"
    monkeypatch.syspath_prepend(docs)
    made = {docs / page for page in importlib.import_module("hooks").made()}
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(
            r"\]\((?!https?:)([^)#]+)", FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
        )
    ]
    assert len(links) > 100
    for page, target in links:
        there = (ROOT / page).parent.joinpath(target).resolve()
        assert there.exists() or (there in made and page.startswith("docs/")), (
            f"{page} links to {target}"
        )
