"""The report in a real browser: every figure drawn, by day and night, on a desk and on a phone; the tree answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser import Watched, chromium, find_chromium, visit

from fedclade.config import Config, read_config
from fedclade.config.toml_files import find_config
from fedclade.report.page import RunView, comparison_page, run_page, write_page
from fedclade.runs.store import Run

PAGES = ("cfl", "fl_hc", "three")

FIGURES = {
    "cfl": {"gains-0", "scores-0", "similarity-0", "flow-0", "clients-0", "norms-0"},
    "fl_hc": {
        "gains-0",
        "scores-0",
        "similarity-0",
        "dendrogram-0",
        "flow-0",
        "clients-0",
        "norms-0",
    },
    "three": {"scores-0", "clusters-0", "traffic-0", "clients-0"},
}


def demo_config(name: str) -> Config:
    """Return a config of the demo; FL+HC has none there, and takes CFL's."""
    if name != "fl_hc":
        return read_config(find_config(f"{name}-digits-label-swap"))
    changes = [
        "algorithm.rounds_before=10",
        "algorithm.metric=l2",
        "algorithm.linkage=ward",
        "rounds=14",
    ]
    config = find_config("fedavg-digits-label-swap")
    return read_config(config, ["algorithm.name=fl_hc", *changes])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages of the demo's CFL run, of an FL+HC run, and of both beside FedAvg."""
    folder = tmp_path_factory.mktemp("pages")
    runs: dict[str, Run] = {}
    for name in ("fedavg", "cfl", "fl_hc"):
        config = demo_config(name)
        runs[name] = config.run(config.federation())
    cfl = RunView(runs["cfl"], runs["fedavg"], "fedavg")
    three = comparison_page([RunView(run) for run in runs.values()], folder)
    made = {"cfl": run_page(cfl), "fl_hc": run_page(RunView(runs["fl_hc"])), "three": three}
    return {name: write_page(page, folder / f"{name}.html") for name, page in made.items()}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def drawn_figures(page: Page) -> set[str]:
    """Return the figures that have something drawn in them, wider than nothing and no wider than the window."""
    return set(
        page.evaluate(
            """() => [...document.querySelectorAll(".plot:not([hidden])")].filter((place) => {
                const marks = place.querySelectorAll(".trace, .hm image, .sankey-node, .points path, .bars path");
                const svg = place.querySelector("svg.main-svg");
                if (!svg || !marks.length) return false;
                const box = svg.getBoundingClientRect();
                return box.width > 200 && box.height > 200 && box.right <= innerWidth;
            }).map((place) => place.id)"""
        )
    )


def check_drawn(page: Page, name: str, width: int, scheme: str) -> None:
    """Check that a page shows all its figures, in the colours that were asked for, and fits into the window."""
    assert drawn_figures(page) == FIGURES[name]
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nobody scrolls sideways"
    letters = "getComputedStyle(document.querySelector('#scores-0 .xtick text')).fill"
    assert (
        page.evaluate(letters) == {"light": "rgb(34, 34, 34)", "dark": "rgb(232, 234, 237)"}[scheme]
    )


@pytest.fixture(scope="module", params=PAGES)
def desk(
    request: pytest.FixtureRequest, browser: Browser, pages: dict[str, Path]
) -> Iterator[tuple[str, Watched]]:
    """Open each page once in a wide window, by day."""
    with visit(browser, pages[request.param].as_uri()) as watched:
        watched.drawn("light", 1280)
        yield request.param, watched


def test_on_a_desk_every_figure_is_drawn_by_day_and_by_night(desk: tuple[str, Watched]):
    name, watched = desk
    check_drawn(watched.page, name, 1280, "light")
    watched.page.emulate_media(color_scheme="dark")
    check_drawn(watched.drawn("dark", 1280), name, 1280, "dark")
    watched.page.get_by_role("button", name="Switch to light colours").click()
    check_drawn(watched.drawn("light", 1280), name, 1280, "light")
    watched.check()


@pytest.mark.parametrize("name", PAGES)
def test_on_a_phone_every_figure_is_drawn_by_night_and_by_day(
    browser: Browser, pages: dict[str, Path], name: str
):
    with visit(browser, pages[name].as_uri(), width=390, scheme="dark") as watched:
        check_drawn(watched.drawn("dark", 390), name, 390, "dark")
        watched.page.emulate_media(color_scheme="light")
        check_drawn(watched.drawn("light", 390), name, 390, "light")
        for folded in watched.page.locator("summary").all():
            folded.click()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390, (
            "wide tables scroll by themselves"
        )
        watched.check()


def test_the_tree_answers_a_click(desk: tuple[str, Watched]):
    tree = desk[1].page.locator(".tree").last
    expect(tree.locator(".hint")).to_be_visible()
    branch = tree.locator('.branch[data-node="1"]')
    branch.locator(".bar").click()
    expect(branch).to_have_attribute("aria-selected", "true")
    expect(tree.locator(".hint")).to_be_hidden()
    shown = tree.locator(".node:visible")
    expect(shown).to_have_count(1)
    expect(shown.locator("h3")).to_have_text("Cluster 1")
    for told in ("clients", "accuracy", "purity", "True clusters of its clients", "Members"):
        expect(shown).to_contain_text(told)
    tree.locator('.branch[data-node="2"] .bar').click()
    expect(branch).to_have_attribute("aria-selected", "false")
    expect(tree.locator(".node:visible h3")).to_have_text("Cluster 2")
    desk[1].check()


def test_the_tree_answers_the_keyboard(desk: tuple[str, Watched]):
    page = desk[1].page
    tree = page.locator(".tree").last
    focused = tree.locator(".branch:focus")
    assert tree.locator('.branch[tabindex="0"]').count() == 1, "the tree is one stop of the Tab key"
    tree.locator('.branch[data-node="0"]').focus()
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("data-parent", "0")
    outline = focused.locator(".reach").evaluate("element => getComputedStyle(element).strokeWidth")
    assert outline == "3px", "who has the focus can be seen"
    page.keyboard.press("Enter")
    expect(focused).to_have_attribute("aria-selected", "true")
    first = tree.locator(".node:visible h3").inner_text()
    page.keyboard.press("End")
    page.keyboard.press("Space")
    assert tree.locator(".node:visible h3").inner_text() != first
    page.keyboard.press("Home")
    expect(focused).to_have_attribute("data-node", "0")
    page.keyboard.press("Space")
    expect(tree.locator(".node:visible h3")).to_have_text("Root")
    desk[1].check()


def test_the_tab_key_reaches_the_tree(desk: tuple[str, Watched]):
    page = desk[1].page
    # Tab reaches the node that was selected last, perhaps by another test
    page.locator(".tree").last.locator('.branch[data-node="0"]').press("Enter")
    page.locator("#theme").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.branch')"):
            break
    label = page.locator(".branch:focus").get_attribute("aria-label") or ""
    assert label.startswith("root 0: clients 20, rounds 1 to ")


def test_every_picture_has_words_and_numbers(desk: tuple[str, Watched]):
    page = desk[1].page
    plots = page.locator(".plot").all()
    assert len(plots) >= 2
    for place in plots:
        assert place.get_attribute("role") == "img"
        assert place.get_attribute("aria-label")
        described = page.locator(f"#{place.get_attribute('aria-describedby')}")
        assert len(described.inner_text()) > 40
    for figure in page.locator("section:has(.plot)").all():
        assert figure.locator("table td").count() > 3, "the numbers are there too"


def test_another_cluster_s_similarities_can_be_chosen(desk: tuple[str, Watched]):
    name, watched = desk
    choice = watched.page.locator("#similarity-choice")
    assert (choice.count() == 1) == (name == "cfl"), (
        "FL+HC compares clients once, and a comparison shows none"
    )
    if name == "cfl":
        choice.select_option(index=1)
        expect(watched.page.locator("#similarity-0")).to_be_hidden()
        expect(watched.page.locator("#similarity-1 .hm image")).to_have_count(1)
    watched.check()


def test_the_table_of_clients_is_sorted_by_a_click_on_a_head(desk: tuple[str, Watched]):
    name, watched = desk
    if name == "three":
        expect(watched.page.locator("#gains")).to_have_count(0)
        return
    table = watched.page.locator("#gains table.sortable")
    head = table.locator("thead button", has_text="gain over trivial")

    def gains() -> list[float]:
        texts = table.locator("tbody tr").evaluate_all(
            "(rows, column) => rows.map((row) => row.cells[column].textContent)",
            head.evaluate("button => button.closest('th').cellIndex"),
        )
        return [float(text.split(" ")[0].replace("−", "-")) for text in texts]

    assert len(set(gains())) > 1, "or no order shows anything"
    head.click()
    assert gains() == sorted(gains(), reverse=True)
    head.press("Enter")
    assert gains() == sorted(gains())
    expect(head.locator("xpath=..")).to_have_attribute("aria-sort", "ascending")
    names = table.locator("thead button", has_text="client").first
    names.click()
    first = table.locator("tbody th").first
    expect(first).to_have_text("client-0")


def test_without_a_browser_the_tests_fail_and_say_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CHROME", "/no/browser")
    with pytest.raises(
        pytest.fail.Exception, match=r"no Chromium was found under /no/browser, chromium, .*apt-get"
    ):
        find_chromium()
