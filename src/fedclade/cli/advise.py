"""Command ``advise``: recommend a method for the clients' data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli import options
from fedclade.cli.inspect import (
    Client,
    Dates,
    Decimal,
    Encoding,
    Separator,
    Target,
    check_new_config,
)
from fedclade.cli.options import interruptible, new_console, say
from fedclade.core import RunError, write_text
from fedclade.data import TextFormat
from fedclade.report import RunProgress
from fedclade.sweeps import advise


def advise_on_data(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES...", help="As for 'fedclade init'; or a config, whose data is used."
        ),
    ],
    client: Client = None,
    target: Target = None,
    encoding: Encoding = None,
    separator: Separator = None,
    decimal: Decimal = None,
    dates: Dates = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of rounds of each run.")
    ] = 20,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            min=1,
            help="Number of repetitions with other splits of the training data; more of them "
            "narrow the interval.",
        ),
    ] = 3,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="BEST.toml",
            help="Config of the recommended run to write; it must not exist yet.",
        ),
    ] = Path("best.toml"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the advice as JSON, and nothing else.")
    ] = False,
    data_dir: options.DataDir = None,
    override: options.Set = None,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Recommend what each client should be served with: one model, its group's or an own model.

    The methods fedavg (one model), rcfl (a model for each group), auto (the best of several models
    for each client) and local (each client alone) run on parts of the training data, never on test
    data. A fifth of each client's training data is held out to compare the methods. auto chooses
    models on another fifth, so that the held-out examples have chosen no model; the other methods
    train on that part, too.

    The result is three sentences: the models and the number of clients for each, the method, and
    its expected gain over one model for all with a 95 % interval; and a config of the recommended
    run for 'fedclade run'.

    Example: fedclade advise hospitals/*.csv --target readmitted
    """
    text_format = TextFormat(encoding=encoding, separator=separator, decimal=decimal, dates=dates)
    check_new_config(out)
    options.make_parent_folder(out)
    options.check_machine(device, None)
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
