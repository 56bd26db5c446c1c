"""Command ``advise``: recommend a method for the clients' data."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from fedclade.cli import arguments, options
from fedclade.cli.inspect import check_new_config
from fedclade.cli.options import interruptible, new_console, say
from fedclade.core import RunError, write_text
from fedclade.data import TextFormat
from fedclade.report import RunProgress
from fedclade.sweeps import advise


def advise_on_data(
    *,
    files: list[str],
    client: str | None,
    target: str | None,
    encoding: str | None,
    separator: str | None,
    decimal: str | None,
    dates: str | None,
    rounds: int,
    seeds: int,
    out: Path,
    as_json: bool,
    data_dir: Path | None,
    override: list[str] | None,
    device: str,
    quiet: bool,
) -> None:
    """Carry out the command ``fedclade advise``."""
    text_format = TextFormat(encoding=encoding, separator=separator, decimal=decimal, dates=dates)
    check_new_config(out)
    arguments.make_parent_folder(out)
    arguments.check_machine(device, None)
    console = new_console()
    is_silent = quiet or as_json
    progress = RunProgress(console, quiet=is_silent)

    def report(line: str) -> None:
        if not is_silent:
            say(console, line)

    with progress.shown(), interruptible(lambda: "start again with the same command") as stop:
        advice = advise(
            files,
            rounds=rounds,
            seeds=seeds,
            client=client,
            target=target,
            text_format=text_format,
            overrides=options.overrides(override),
            data_dir=data_dir,
            device=device,
            report=report,
            on_start=progress.start,
            stop=stop,
        )
    try:
        write_text(out, advice.to_toml())
    except OSError as error:
        raise RunError(f"cannot write {out}: {error}; choose another file with --out") from error
    if as_json:
        typer.echo(json.dumps({**advice.as_dict(), "out": str(out)}, ensure_ascii=False))
        return
    if advice.left_out and not quiet:
        say(console, f"left out, with fewer than 3 examples: {', '.join(advice.left_out)}")
    for number, sentence in enumerate(advice.sentences, start=1):
        say(console, f"{number}. {sentence}")
    if not quiet:
        say(console, f"config: {out}; start the recommended run with: fedclade run {out}")
