"""``fedclade report``, and who looks on during ``fedclade run``, as a user calls them."""

from __future__ import annotations

import http.client
import json
import re
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.browser import chromium

from fedclade import Run
from fedclade.cli import main
from fedclade.config import read_config
from fedclade.core import RunInterrupted
from fedclade.report.page import Dashboard
from fedclade.runs import FollowedRun

SMALL = """
rounds = 3
[data]
name = "digits"
clients = 4
samples_per_client = 40
shift = "label_swap"
clusters = 2
[model]
name = "mclr"
[algorithm]
name = "cfl"
split_rounds = [2]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of CFL, and one of FedAvg over the same clients."""
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Run] = {}
    for name in ("cfl", "fedavg"):
        (folder / f"{name}.toml").write_text(
            SMALL if name == "cfl" else SMALL.split("[algorithm]")[0]
        )
        config = read_config(folder / f"{name}.toml")
        found[name] = config.run(config.federation())
    return found


@pytest.fixture
def fedclade(
    runs: dict[str, Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in a folder with the two runs."""
    monkeypatch.chdir(tmp_path)
    for name, run in runs.items():
        run.save(tmp_path / "both" / name / "seed-0")
    (tmp_path / "small.toml").write_text(SMALL)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return call


CFL, FEDAVG = "both/cfl/seed-0", "both/fedavg/seed-0"


def test_report_writes_a_page_beside_its_run(fedclade, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    code, out, err = fedclade("report", CFL, "--against", FEDAVG, "--open")
    assert (code, err) == (0, "")
    assert f"figures: {CFL}/figures" in out
    assert re.search(r"mean accuracy of the clients: .+ points \[.+\] against fedavg", out)
    assert out.rstrip().endswith(f"report: {CFL}/report.html")
    page = Path(CFL, "report.html")
    assert "] against fedavg" in page.read_text()
    assert opened == [page.resolve().as_uri()]
    assert Run.load(CFL).summary["rounds"] == 3, "the folder is still read"


@pytest.mark.parametrize("latex", [[], ["--latex"]])
def test_figures_in_a_folder_that_cannot_be_made_are_an_error(fedclade, latex: list[str]):
    Path("file").touch()
    code, _, err = fedclade("report", CFL, FEDAVG, *latex, "--figures", "file/figures")
    assert code == 2
    assert "error: cannot write the figures to file/figures: " in err
    assert "Traceback" not in err


def test_report_takes_newcomers_along(fedclade):
    row = {"name": "a newcomer", "path": [0], "fits": True, "margin": None}
    row |= dict.fromkeys(("accuracy", "accuracy_root", "accuracy_own", "accuracy_fine_tuned"), 0.5)
    told = {
        "summary": {"newcomers": 1, "fit_nowhere": 0, "assignment_accuracy": None, **row},
        "newcomers": [row],
    }
    Path(CFL, "newcomers.json").write_text(json.dumps(told))
    assert fedclade("report", CFL, "--out", "mine.html")[0] == 0
    assert "a newcomer" in Path("mine.html").read_text()
    assert not Path(CFL, "report.html").exists()


def test_report_compares_runs_on_one_page(fedclade):
    code, out, _ = fedclade("report", CFL, FEDAVG)
    assert code == 0
    assert out.rstrip().endswith("report: report.html")
    assert "Comparison of 2 configurations" in out
    first = Path("report.html").read_text()
    assert "<h1>Comparison of 2 runs</h1>" in first
    assert fedclade("report", "both", "--out", "again.html")[0] == 0
    assert Path("again.html").read_text() == first, "the folder of a comparison stands for its runs"


def test_report_prints_a_latex_table_and_nothing_else(fedclade, runs: dict[str, Run]):
    for seed in (1, 2):
        for name, run in runs.items():
            other = replace(
                run, summary={**run.summary, "seed": seed}, config={**run.config, "seed": seed}
            )
            other.save(Path("both", name, f"seed-{seed}"))
    code, out, err = fedclade("report", "both", "--latex", "--figures", "pdfs")
    assert (code, err) == (0, "")
    assert out.startswith("% This table needs \\usepackage{booktabs}.\n\\begin{table}\n")
    assert out.endswith("\\end{table}\n")
    assert "over 3 seeds" in out
    rows = [line.split("&")[0].strip() for line in out.splitlines() if line.endswith("\\\\")]
    assert rows == ["config", "cfl", "fedavg"]
    assert not Path("report.html").exists()
    assert [path.name for path in Path("pdfs").iterdir()] == ["comparison.pdf"]


def test_cite_lists_what_runs_used_and_each_entry_once(fedclade):
    code, out, _ = fedclade("cite", CFL)
    assert code == 0
    keys = [line.split("{")[1].rstrip(",") for line in out.splitlines() if line.startswith("@")]
    assert keys == ["fedclade", "paszke2019pytorch", "sattler2021cfl", "alpaydin1998digits"]
    code, out, _ = fedclade("cite", "both")
    keys = [line.split("{")[1].rstrip(",") for line in out.splitlines() if line.startswith("@")]
    assert len(keys) == len(set(keys)) == 5
    assert "mcmahan2017fedavg" in keys
    Path("cfl").mkdir()
    assert fedclade("cite", "cfl")[1].startswith("@article{sattler2021cfl"), "a name comes first"
    code, _, err = fedclade("cite", "./cfl")
    assert code == 2
    assert "cfl is not a run folder" in " ".join(err.split())


@pytest.mark.parametrize("option", ["--out a.html", f"--against {FEDAVG}", "--open"])
def test_latex_writes_no_page(fedclade, option: str):
    code, out, err = fedclade("report", CFL, "--latex", *option.split())
    assert (code, out) == (2, "")
    told = f"--latex prints a table and writes no page; leave out {option.split()[0]}"
    assert told in " ".join(err.split())


def test_a_run_folder_exports_its_figures_as_pdf_with_embedded_fonts(fedclade):
    code, out, _ = fedclade("report", CFL, "--figures", "for/paper")
    assert code == 0
    assert "figures as PDF: for/paper" in out
    written = {path.name: path.read_bytes() for path in Path("for/paper").iterdir()}
    assert set(written) == {"accuracy.pdf", "norms.pdf", "similarity.pdf"}
    for content in written.values():
        assert content.startswith(b"%PDF")
        assert b"/FontFile2" in content  # the program of a TrueType font
        assert b"/Type3" not in content
        assert b"CreationDate" not in content
    Path("file").touch()
    code, _, err = fedclade("report", CFL, "--figures", "file/figures")
    assert code == 2
    assert "cannot write the figures to file/figures" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((CFL, "--out", "page.pdf"), "--out should end in .html, got page.pdf"),
        (
            (CFL, FEDAVG, "--against", FEDAVG),
            "--against needs a report of one run, got 2 runs; name one run, or leave --against out",
        ),
        ((CFL, CFL), f"each run can be compared only once, got {CFL} more than once"),
        (
            (CFL, "--against", "smaller"),
            "--against should be a run of the same clients: smaller has no client 3",
        ),
        (
            (CFL, "--against", "words"),
            "--against should be a run of the same task: words has no metric accuracy",
        ),
        ((CFL, "--against", "nowhere"), "there is no folder nowhere; name the folder of a run"),
        (("nowhere",), "there is no folder nowhere; name the folder of a run"),
        (
            ("spoiled",),
            "spoiled/newcomers.json is damaged: Expecting value: line 1 column 1 (char 0); make it again",
        ),
    ],
)
def test_report_says_what_is_wrong(
    fedclade, runs: dict[str, Run], arguments: tuple[str, ...], told: str
):
    fedavg = runs["fedavg"]
    replace(fedavg, client_rows=[row for row in fedavg.client_rows if row["client"] < 3]).save(
        "smaller"
    )
    errors = {
        "metrics": [{"name": "mae", "higher_is_better": False, "share": False}],
        "mae": fedavg.summary["accuracy"],
    }
    rows = [{**row, "mae": row["accuracy"]} for row in fedavg.client_rows]
    replace(fedavg, summary={**fedavg.summary, **errors}, client_rows=rows).save("words")
    runs["cfl"].save(
        "spoiled", extra=lambda beside: (beside / "newcomers.json").write_text("no JSON")
    )
    code, _, err = fedclade("report", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert told in err


def test_run_names_the_way_to_the_report(fedclade):
    _, out, _ = fedclade("run", "small.toml", "--out", "loud")
    assert "open its report with: fedclade report loud --open" in out
    _, out, _ = fedclade("run", "small.toml", "--out", "quiet", "-q")
    assert out.strip() == "run folder: quiet"


def test_rounds_are_logged_and_go_on_when_the_run_does(fedclade):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert (
        fedclade(
            "run",
            "small.toml",
            "--out",
            "logged",
            "--log",
            "tensorboard",
            "--set",
            "checkpoint_every=1",
        )[0]
        == 0
    )
    assert fedclade("resume", "logged", "--rounds", "5", "--log", "tensorboard")[0] == 0
    events = EventAccumulator("logged/tensorboard")
    events.Reload()
    metrics = Run.load("logged").metric_rows
    accuracy = [(event.step, event.value) for event in events.Scalars("accuracy/mean")]
    assert [step for step, _ in accuracy] == [1, 2, 3, 4, 5]
    assert [value for _, value in accuracy] == pytest.approx(
        [row["accuracy_mean"] for row in metrics]
    )


OWN = """
import fedclade

class Counts(fedclade.Callback):
    "Counts."
    rounds = splits = 0

    def on_split(self, record):
        self.splits += 1

    def on_round(self, record):
        self.rounds += 1

    def on_end(self, record):
        print(f"heard of {self.rounds} rounds and {self.splits} split")
"""


def test_watching_changes_nothing_of_a_run(fedclade, monkeypatch, tmp_path):
    (tmp_path / "own_callback.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    fedclade("run", "small.toml", "--out", "alone")
    code, out, err = fedclade(
        *("run", "small.toml", "--out", "watched", "--dashboard", "--port", "0"),
        *("--log", "tensorboard", "--log", "own_callback:Counts"),
    )
    assert (code, err) == (0, "")
    assert "heard of 3 rounds and 0 split" in out
    assert "dashboard: http://127.0.0.1:" in out
    for name in ("tree/tree.safetensors", "clients.parquet", "events.jsonl", "config.toml"):
        assert Path("alone", name).read_bytes() == Path("watched", name).read_bytes()


def test_every_run_of_a_comparison_has_callbacks_of_its_own(fedclade, monkeypatch, tmp_path):
    (tmp_path / "own_callback.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_callback", raising=False)
    compared = ("compare", "small.toml", "--seeds", "2", "--out", "two", "--rounds", "1", "-q")
    code, out, err = fedclade(*compared, "--log", "own_callback:Counts")
    assert (code, err) == (0, "")
    assert out.count("heard of 1 rounds and 0 split") == 2
    code, _, err = fedclade("compare", "small.toml", "--out", "none", "--log", "tensorbord")
    assert code == 2
    assert "unknown callback 'tensorbord'; did you mean 'tensorboard'" in err
    assert not Path("none").exists()


def test_a_port_that_is_taken_is_told_before_anything_is_run(fedclade):
    server = http.client.socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    code, _, err = fedclade("run", "small.toml", "--out", "result", "--dashboard", "--port", port)
    server.close()
    assert code == 2
    assert f"error: the dashboard cannot listen on port {port}" in err
    assert not Path("result").exists()


def test_a_live_report_is_served_until_ctrl_c(fedclade, monkeypatch):
    fedclade("run", "small.toml", "--out", "result", "--quiet")
    states: list[dict[str, Any]] = []
    follow = Dashboard.follow

    def look(dashboard: Dashboard, followed: FollowedRun) -> None:
        follow(dashboard, followed)
        connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=10)
        connection.request("GET", "/state")
        states.append(json.loads(connection.getresponse().read()))
        connection.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Dashboard, "follow", look)
    code, out, err = fedclade("report", "result", "--live", "--port", "0")
    assert (code, err) == (0, "")
    assert re.search(
        r"live report: http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it, but not the run\)", out
    )
    assert [state["status"].split(",")[0] for state in states] == ["Finished after 3 rounds"]
    assert not Path("result/report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("result", "other"), "--live shows one run, without further options, got 2 runs"),
        (("result", "--out", "a.html"), "without further options, got --out; leave it out"),
        (("nothing",), "nothing contains no run yet; name the run folder"),
    ],
)
def test_a_live_report_is_of_one_run(fedclade, arguments, told):
    code, _, err = fedclade("report", *arguments, "--live")
    assert code == 2
    assert told in " ".join(err.split())


@pytest.mark.slow
def test_a_browser_sees_new_rounds_as_they_end(runs: dict[str, Run], tmp_path: Path):
    from fedclade.report.page.dashboard import Dashboard

    config = read_config(_written(tmp_path / "live.toml"))
    seen = {2: threading.Event(), 4: threading.Event()}
    with chromium() as browser, Dashboard("live", config.top.rounds, tmp_path, 0) as dashboard:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.goto(dashboard.url)

        def on_round(row: dict[str, Any], tree: object) -> None:
            # the run does not go on before it is on the page
            if wait := seen.get(row["round"] - 1):
                wait.wait(60)

        def work() -> None:
            config.run(config.federation(), callbacks=[dashboard], on_round=on_round)

        running = threading.Thread(target=work)
        running.start()
        page.wait_for_selector('html[data-round="2"]', state="attached")
        seen[2].set()
        page.wait_for_selector(".branch", state="attached")
        page.locator(".branch").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector('html[data-round="4"]', state="attached")
        seen[4].set()
        page.wait_for_selector('html[data-version="6 over"]', state="attached")
        running.join()
        assert page.locator("#status").inner_text().startswith("Finished after 6 rounds")
        assert page.locator(".node:visible h3").inner_text() == "Root", "what was chosen stays"
        assert page.evaluate("document.activeElement.dataset.node") == "0", "and so does the focus"
        page.wait_for_selector("#scores-0 .trace")
        assert errors == []


def _written(path: Path) -> Path:
    path.write_text(SMALL.replace("rounds = 3", "rounds = 6", 1))
    return path


HOSPITALS = """
rounds = 1
[data]
files = "data/*.csv"
target = "back"
attributes = "sites.csv"
[report]
references = false
"""


@pytest.fixture
def hospital_run(fedclade: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Path:
    """The folder of a run of two hospitals without references."""
    (tmp_path / "data").mkdir()
    for name in ("north", "south"):
        rows = "".join(f"{i},{i % 2}\n" for i in range(12))
        (tmp_path / "data" / f"{name}.csv").write_text(f"age,back\n{rows}")
    (tmp_path / "sites.csv").write_text("client,country\nnorth,Norway\nsouth,Italy\n")
    (tmp_path / "hospitals.toml").write_text(HOSPITALS)
    code, _, err = fedclade("run", "hospitals.toml", "--out", "run", "--quiet")
    assert code == 0, err
    return tmp_path / "run"


def test_references_are_added_to_a_finished_run_and_written_as_csv(fedclade, hospital_run):
    assert Run.load(hospital_run).gains.models == ("trivial", "cluster_model")
    code, out, err = fedclade("report", "run", "--references")
    assert code == 0, err
    assert Run.load(hospital_run).gains.models[1] == "alone"
    head, *rows = (hospital_run / "gains.csv").read_text().splitlines()
    assert head.split(",")[-1] == "attribute_country"
    assert [row.split(",")[1] for row in rows] == ["north", "south"]
    assert "What do the clients gain?" in out
    assert "gains.csv" in out
    assert "What do the clients gain?" in (hospital_run / "report.html").read_text()


def test_resume_continues_references_that_a_report_began(fedclade, tmp_path):
    folder = tmp_path / "run"
    code, _, err = fedclade("run", "small.toml", "--out", "run", "--quiet")
    assert code == 0, err
    config = read_config(folder / "config.toml")
    with pytest.raises(RunInterrupted):
        config.run(config.federation(), folder=folder, references=True, stop=lambda: True)
    code, out, err = fedclade("resume", "run", "--finish")
    assert (code, "there is nothing to continue" in out) == (0, True), err
    code, out, err = fedclade("resume", "run")
    assert code == 0, err
    assert "training the reference alone, for the report" in out
    assert "training the reference one_model, for the report" in out
    assert Run.load(folder).gains.models[1:3] == ("alone", "one_model")


def test_attributes_are_read_for_the_report(fedclade, hospital_run, tmp_path):
    (tmp_path / "others.csv").write_text("client,beds\nnorth,100\nsouth,900\n")
    code, _, err = fedclade("report", "run", "--attributes", "others.csv")
    assert code == 0, err
    assert "attribute_beds" in (hospital_run / "gains.csv").read_text()
    assert Run.load(hospital_run).gains.clients[0].attributes == {"country": "Norway"}
    code, _, err = fedclade("report", "run", "--attributes", "nowhere.csv")
    assert code == 2
    assert "cannot read attributes of clients: there is no file nowhere.csv" in err


def test_references_need_data_that_can_be_loaded(fedclade, tmp_path, runs):
    run = runs["cfl"]
    network = replace(run, config={**run.config, "network": {"clients": 4}})
    network.save(tmp_path / "network")
    code, _, err = fedclade("report", "network", "--references")
    assert code == 2
    assert "run of a network, whose clients' data never leaves them" in " ".join(err.split())
    apps = replace(run, config={**run.config, "client_app": {}})
    apps.save(tmp_path / "apps")
    code, _, err = fedclade("report", "apps", "--references")
    assert code == 2
    assert "run of plain ClientApps, whose data are not here" in " ".join(err.split())
    python = replace(run, config={**run.config, "model": {"name": "MyModel"}})
    python.save(tmp_path / "python")
    code, _, err = fedclade("report", "python", "--references")
    assert code == 2
    assert "was not made from a config" in " ".join(err.split())


@pytest.mark.parametrize("option", [("--references",), ("--attributes", "sites.csv")])
def test_references_and_attributes_are_for_one_run(fedclade, option):
    code, _, err = fedclade("report", "both/cfl/seed-0", "both/fedavg/seed-0", *option)
    assert code == 2
    assert f"{option[0]} needs a report of one run, got 2 runs" in " ".join(err.split())
