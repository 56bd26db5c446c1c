"""From a folder of CSV files to a report, by the command line alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedclade.cli import main
from fedclade.config import read_config

CONFIG = """
rounds = 6
[data]
files = "hospitals/*.csv"
target = "readmitted"
standardize = "federated"
[task]
name = "binary"
"""


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Write the tables of six hospitals, with the config beside their folder; return the config."""
    draw = np.random.default_rng(0)
    (tmp_path / "hospitals").mkdir()
    for number in range(6):
        age, bmi, ward = (
            draw.normal(60, 12, 80),
            draw.normal(26, 4, 80),
            draw.choice(["icu", "surgery"], 80),
        )
        back = (age - 60) / 12 + (ward == "icu") + draw.normal(0, 0.3, 80) > 0.5
        rows = [
            f"{a:.1f},{b:.1f},{w},{'yes' if y else 'no'}"
            for a, b, w, y in zip(age, bmi, ward, back, strict=True)
        ]
        text = "\n".join(["age,bmi,ward,readmitted", *rows])
        (tmp_path / "hospitals" / f"hospital-{number}.csv").write_text(text)
    (tmp_path / "my.toml").write_text(CONFIG)
    return tmp_path / "my.toml"


def fedclade(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
    try:
        main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def test_a_folder_of_files_needs_no_python(
    hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in CONFIG.splitlines() if line]) < 10
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    # which takes most of the time
    monkeypatch.setattr("fedclade.cli.run.add_figures", lambda *_: None)
    assert (
        fedclade(monkeypatch, "run", str(hospitals), "--out", "out", "--quiet", "--engine", "loop")
        == 0
    )
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["inputs"]["columns"] == ["age", "bmi", "ward=icu", "ward=surgery"]
    assert summary["inputs"]["labels"] == ["no", "yes"]
    assert summary["inputs"]["mean"] == pytest.approx([60, 26, 0, 0], abs=2)
    assert summary["clients"] == 6
    metric = summary["metrics"][0]["name"]
    assert summary[metric]["mean"] > 0.8
    assert (
        fedclade(monkeypatch, "export", "out", "--client", "0", "--out", "model.safetensors") == 0
    )
    assert "| columns | (age − " in Path("model.md").read_text()
    monkeypatch.chdir(tmp_path.parent)
    # a run's own config finds the files from anywhere
    again = read_config(elsewhere / "out" / "config.toml")
    assert again.federation().fingerprint == read_config(hospitals).federation().fingerprint


def test_its_report_names_the_hospitals(
    hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    assert fedclade(monkeypatch, "run", str(hospitals), "--out", out, "--quiet") == 0
    assert fedclade(monkeypatch, "report", out) == 0
    assert "hospital-5" in Path(out, "report.html").read_text()


def test_what_is_wrong_with_a_table_is_one_line(
    hospitals: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with (hospitals.parent / "hospitals" / "hospital-3.csv").open("a") as table:
        table.write("\ninf,20.0,icu,no")
    assert (
        fedclade(
            monkeypatch, "run", str(hospitals), "--out", str(hospitals.parent / "out"), "--quiet"
        )
        != 0
    )
    told = capsys.readouterr().err.strip()
    assert "hospital-3.csv: column 'age' has inf in row 81; correct the cell" in told
    assert "\n" not in told
