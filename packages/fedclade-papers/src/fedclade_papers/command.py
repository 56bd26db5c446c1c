"""The command ``fedclade reproduce``, which measures tables and figures of the papers again."""

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
    """Scale of a measurement: the paper's settings, or settings that are reduced to save time."""

    SMOKE = "smoke"
    LAPTOP = "laptop"
    PAPER = "paper"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Names of experiments as in --list, or '{ALL}'.", show_default=False),
    ] = None,
    scale: Annotated[
        ScaleName,
        typer.Option(
            "--scale",
            help="smoke: each takes under 20 s; laptop: 10 s to 1.5 h on 2 cores; "
            "paper: as in the paper.",
        ),
    ] = ScaleName.LAPTOP,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results. Default: reproduced/NAME-SCALE."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the scale, such as --set seeds=[0]. Repeatable.",
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List all experiments and exit.")
    ] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Measure tables and figures of papers again, and compare them with the papers' numbers.

    Finished parts are stored, so the same command continues after an interruption.

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
    with interruptible(lambda: "run the same command again to continue") as stop:
        for experiment in chosen:
            missing = missing_data(experiment, scale.value, data_dir)
            # "all" measures the experiments whose data is available.
            if missing and experiment.name not in (names or []):
                what = f"{', '.join(missing)} is not in {escape(str(data_dir))}"
                console.print(f"[yellow]experiment {experiment.name} is skipped:[/] {what}\n")
                continue
            folder = out or Path("reproduced") / f"{experiment.name}-{scale.value}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(
                    f"cannot create the folder {folder} for results: {error}; choose another "
                    "folder with --out"
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
    """Return the experiments that the command line names, without duplicates.

    The name ``all`` stands for all experiments in ``known``.

    Raises
    ------
    ConfigError
        If ``names`` is empty, or contains the name of an unknown experiment.
    """
    if not names:
        raise ConfigError(
            f"no experiment is named; name experiments of 'fedclade reproduce --list', or '{ALL}'"
        )
    for name in names:
        if name not in known and name != ALL:
            raise ConfigError(unknown("experiment", name, known))
    if ALL in names:
        return list(known.values())
    return [known[name] for name in dict.fromkeys(names)]


def changes(settings: Sequence[str]) -> dict[str, Any]:
    """Parse the options ``--set KEY=VALUE``, and return the changed settings by key.

    A value is parsed as JSON; a value that is not valid JSON is a string.

    >>> changes(["seeds=[0, 1]", "model=mlp", "samples_per_client=null"])
    {'seeds': [0, 1], 'model': 'mlp', 'samples_per_client': None}

    Raises
    ------
    ConfigError
        If an option has no ``=`` or no key before the ``=``.
    """
    changed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"the option --set should have the form KEY=VALUE, got {setting!r}")
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
    """Write the JSON, CSV and Markdown files and the figure of a result, and return the suffixes.

    Without matplotlib the figure is not written, and a message on the console states this.
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
        console.print(Text(f"settings of the scale {result.scale} that differ from the paper's:"))
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
    if data_dir is None:
        return "from the Hub"
    return f"no: {', '.join(missing)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
