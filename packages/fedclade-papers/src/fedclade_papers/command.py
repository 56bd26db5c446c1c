"""The command ``reproduce``, which measures the papers' tables and figures again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedclade import ConfigError, MissingExtraError, RunError
from fedclade.cli import DataDir, Device, interruptible, new_console
from fedclade.core import unknown
from fedclade.report import duration, style
from fedclade.training import choose_device
from fedclade_papers import (
    EXPERIMENTS,
    Experiment,
    Result,
    change_table,
    circumstances,
    claim_table,
    is_at_hand,
    measure,
    missing_data,
    row_table,
    summary_lines,
    to_csv,
    to_markdown,
)

ALL = "all"


class ScaleName(StrEnum):
    """Scale of a measurement."""

    SMOKE = "smoke"
    LAPTOP = "laptop"
    PAPER = "paper"


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Names of --list, or '{ALL}'.", show_default=False)
    ] = None,
    scale: Annotated[
        ScaleName,
        typer.Option(
            "--scale",
            help="smoke: under 20 s each; laptop: under 10 min on 2 cores; paper: the paper's setting.",
        ),
    ] = ScaleName.LAPTOP,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; reproduced/NAME-SCALE if left out."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the scale: --set seeds=[0]. Repeatable.",
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the experiments, and leave.")
    ] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Measure tables and figures of the papers again, and compare them with the papers' figures.

    Measured pieces are stored: the same command continues after an interruption.

    Example: fedclade reproduce cfl-fig3-theory --scale smoke
    """
    console = new_console()
    if show_list:
        console.print(_list(data_dir))
        return
    chosen = choose(names or [], EXPERIMENTS)
    changed = changes(settings or [])
    for experiment in chosen:
        experiment.settings(scale.value, changed)
    choose_device(device)
    with interruptible(lambda: "go on with the same command") as stop:
        for experiment in chosen:
            missing = missing_data(experiment, scale.value, data_dir)
            # "all" measures the experiments whose data is available.
            if missing and experiment.name not in (names or []):
                what = f"{', '.join(missing)} is not in {escape(str(data_dir))}"
                console.print(f"[yellow]{experiment.name} is left out:[/] {what}\n")
                continue
            folder = out or Path("reproduced") / f"{experiment.name}-{scale.value}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(
                    f"cannot make the folder {folder}: {error}; give another by --out"
                ) from error
            console.print(Text(f"{experiment.name}: {experiment.title}", style="bold"))
            result = measure(
                experiment,
                scale.value,
                changed=changed,
                data_dir=data_dir,
                device=device,
                folder=folder / f"{experiment.pieces or experiment.name}-{scale.value}-pieces",
                say=_timed(console),
                stop=stop,
            )
            written = ", ".join(_save(result, experiment, folder, console))
            _show(result, console)
            console.print(
                f"written to {folder}: {result.stem}{written}\n", soft_wrap=True, markup=False
            )


def choose(names: Sequence[str], known: Mapping[str, Experiment]) -> list[Experiment]:
    """Return the requested experiments, without duplicates.

    Raises
    ------
    ConfigError
        If no experiment is named, or one is unknown.
    """
    if not names:
        raise ConfigError(f"name an experiment of 'fedclade reproduce --list', or '{ALL}'")
    for name in names:
        if name not in known and name != ALL:
            raise ConfigError(unknown("experiment", name, known))
    return list(known.values()) if ALL in names else [known[name] for name in dict.fromkeys(names)]


def changes(settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings that ``--set`` changes; values are JSON, or plain words.

    >>> changes(["seeds=[0, 1]", "model=mlp", "samples_per_client=null"])
    {'seeds': [0, 1], 'model': 'mlp', 'samples_per_client': None}

    Raises
    ------
    ConfigError
        If a setting has no ``=``.
    """
    changed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set should be KEY=VALUE, got {setting!r}")
        try:
            changed[key] = json.loads(text)
        except ValueError:
            changed[key] = text
    return changed


def _timed(console: Console) -> Callable[[str], None]:
    start = time.perf_counter()

    def say(piece: str) -> None:
        console.print(
            Text(f"  {duration(time.perf_counter() - start):>12}  {piece}", style="dim"),
            soft_wrap=True,
        )

    return say


def _save(result: Result, experiment: Experiment, folder: Path, console: Console) -> list[str]:
    """Write the result's four files and return their suffixes.

    Without matplotlib there is no figure, and a message states that.
    """
    picture: str | None = f"{result.stem}.png"
    try:
        figure = experiment.draw(result.outcome, result.settings)
        style.save(figure, folder / f"{result.stem}.png")
    except MissingExtraError as error:
        console.print(f"[yellow]no figure:[/] {escape(str(error))}", soft_wrap=True)
        picture = None
    (folder / f"{result.stem}.csv").write_text(to_csv(result), encoding="utf-8")
    (folder / f"{result.stem}.md").write_text(to_markdown(result, picture), encoding="utf-8")
    result.save(folder / f"{result.stem}.json")
    return [".json", ".csv", ".md", *([".png"] if picture else [])]


def _show(result: Result, console: Console) -> None:
    console.print(Text(result.source))
    for about, sentence in summary_lines(result.outcome.summary):
        console.print(Text.assemble((f"{about}: ", "bold"), sentence))
    if result.outcome.rows:
        console.print(_table(*row_table(result.outcome.rows)))
    if result.outcome.claims:
        console.print(_table(*claim_table(result.outcome.claims)))
    if result.differences:
        console.print(Text(f"what the scale {result.scale} changes:"))
        console.print(_table(*change_table(result)))
    for remark in result.outcome.remarks:
        console.print(Text(f"· {remark}"))
    console.print(Text(circumstances(result), style="dim"))


def _list(data_dir: Path | None) -> Table:
    rows = (
        (each.name, each.source, each.title, ", ".join(each.data) or "–", _at_hand(each, data_dir))
        for each in EXPERIMENTS.values()
    )
    return _table(("name", "source", "shows", "data", "at hand"), rows)


def _at_hand(experiment: Experiment, data_dir: Path | None) -> str:
    missing = [data for data in experiment.data if not is_at_hand(data, data_dir)]
    if not missing:
        return "yes"
    return "from the Hub" if data_dir is None else f"no: {', '.join(missing)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
