"""What fedclade does in an environment with its core alone: all that needs no extra, and of all else, which extra.

Run by ``check_wheel.py`` in a fresh environment and an empty folder; `python core_only.py` there does the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fedclade
from fedclade.cli import app, main
from fedclade.data import federation_from_frame, load_federation
from fedclade.report import score_figure
from fedclade.report.page import write_report
from fedclade.trackers import PrometheusExporter

OPTIONAL = (
    *(
        "IPython",
        "PIL",
        "cryptography",
        "datasets",
        "dp_accounting",
        "flwr",
        "flwr_datasets",
        "ipywidgets",
    ),
    *(
        "matplotlib",
        "mlflow",
        "onnx",
        "onnxscript",
        "optuna",
        "pandas",
        "plotly",
        "prometheus_client",
        "ray",
        "tensorboard",
        "wandb",
    ),
)
"""None of these may be there; what the core itself comes with, such as torch's jinja2, is."""

TOML = '[data]\nname = "digits"\nclients = 4\nsamples_per_client = 60\nshift = "label_swap"\nclusters = 2\n'

WORKS = [
    ["--version"],
    ["ls"],
    ["example", "hospitals"],
    ["inspect", "hospitals", "--out", "hospitals.html"],
    ["init", "hospitals", "--out", "starter.toml"],
    ["validate", "starter.toml"],
    ["run", "starter.toml", "--rounds", "2", "--out", "started"],
    ["advise", "starter.toml", "--rounds", "2", "--seeds", "1", "--out", "best.toml"],
    ["validate", "cfl-digits-label-swap"],
    ["validate", "my.toml"],
    ["run", "my.toml", "--rounds", "2", "--out", "first"],
    ["run", "my.toml", "--rounds", "2", "--out", "second", "--engine", "loop"],
    ["run", "held.toml", "--rounds", "2", "--out", "held"],
    ["resume", "first", "--rounds", "3"],
    ["assign", "held"],
    ["tree", "first"],
    [
        "predict",
        "started",
        "hospitals/hospital-00.csv",
        "--client",
        "hospital-00",
        "--out",
        "p.csv",
    ],
    ["evaluate", "started", "hospitals/*.csv"],
    ["export", "first", "--client", "3", "--out", "client-3.safetensors"],
    ["cite", "cfl"],
    ["compare", "my.toml", "--rounds", "2", "--seeds", "2", "--out", "compared"],
    ["demo", "--out", "demonstration"],
    ["data", "build", "my.toml", "--out", "built"],
]
"""Command lines, in this order: later ones use what earlier ones wrote."""

NEEDS = [
    ("onnx", ["export", "first", "--client", "3", "--out", "client-3.onnx"]),
    ("report", ["report", "first"]),
    ("report", ["report", "first", "second", "--out", "both.html"]),
    ("report", ["run", "my.toml", "--dashboard", "--out", "no-dashboard"]),
    ("tensorboard", ["run", "my.toml", "--log", "tensorboard", "--out", "no-log"]),
    ("mlflow", ["run", "my.toml", "--log", "mlflow", "--out", "no-log"]),
    ("wandb", ["run", "my.toml", "--log", "wandb", "--out", "no-log"]),
    (
        "sweep",
        ["sweep", "my.toml", "--over", "local.lr=0.1,0.2", "--set", "data.validation_fraction=0.2"],
    ),
    ("ray", ["run", "my.toml", "--engine", "ray", "--out", "no-ray"]),
    (
        "privacy",
        [
            "run",
            "my.toml",
            *("--set", "privacy.clip_norm=1"),
            *("--set", "privacy.noise_multiplier=1"),
        ],
    ),
    ("data", ["run", "rcfl-mnist-label-swap"]),
    ("data", ["run", "my.toml", "--set", "data.partition=dirichlet"]),
    ("data", ["data", "build", "mnist", "--out", "no-data"]),
]
"""Command lines, and the extra that each of them asks for."""


def functions(run: fedclade.Run) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is called from Python, and the extra that it asks for."""
    yield "report", lambda: write_report(run, Path("report.html"))
    yield "report", lambda: score_figure(run)
    yield "notebook", lambda: run.metrics
    yield "notebook", lambda: run.clients
    yield "notebook", run.plot
    yield "monitoring", lambda: PrometheusExporter(9100)
    yield "flower", lambda: importlib.import_module("fedclade.flower")
    for name in ("mnist", "cifar10", "femnist", "ag_news", "sent140", "tiny_shakespeare"):
        yield "data", lambda name=name: load_federation(name, clients=2)
    for name in ("pathological", "dirichlet", "shards"):
        yield "data", lambda name=name: load_federation("digits", clients=2, partition=name)
    yield "ray", lambda: fedclade.simulate("fedavg", "mlp", run_data(), rounds=1, engine="ray")


def run_data() -> fedclade.Federation:
    """Return four small clients of two hidden groups."""
    return load_federation(
        "digits", clients=4, samples_per_client=60, shift="label_swap", clusters=2
    )


def command(arguments: list[str]) -> tuple[int, str, str]:
    """Call the command line; return its exit status, and what it printed on its two streams."""
    sys.argv = ["fedclade", *arguments]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def commands() -> set[str]:
    """Return the names of all commands, ``data`` for those below it."""
    named = {
        each.name or each.callback.__name__ for each in app.registered_commands if each.callback
    }
    return named | {
        str(each.name or each.typer_instance.info.name) for each in app.registered_groups
    }


def check(holds: object, what: str) -> None:
    """End with a message if something does not hold."""
    if not holds:
        sys.exit(f"core_only.py: {what}")


def check_imports() -> None:
    """Import every module: none but those of the network asks for an extra."""
    check(
        not (there := [each for each in OPTIONAL if importlib.util.find_spec(each)]),
        f"{there} should not be here",
    )
    # which does not enter what it cannot import
    for module in pkgutil.walk_packages(fedclade.__path__, "fedclade."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except fedclade.MissingExtraError as error:
            check(module.name == "fedclade.flower", f"{module.name}: {error}")
    check(Path(fedclade.__file__).with_name("py.typed").is_file(), "py.typed is missing")


def check_python() -> None:
    """Simulate, save, load; then call what needs an extra."""
    names = [name for name in fedclade.__all__ if not hasattr(fedclade, name)]
    check(not names, f"fedclade.__all__ names {names}, which are not there")
    run = fedclade.simulate("cfl", "mlp", run_data(), rounds=2)
    run.save("simulated")
    check(
        fedclade.Run.load("simulated").summary["rounds"] == 2, "a run is not loaded as it was saved"
    )
    shown = [
        run,
        run.tree,
        run_data(),
        fedclade.compare(["cfl", "fedavg"], "mlp", run_data(), rounds=1),
    ]
    check(all("</" in each._repr_html_() for each in shown), "something does not show itself")
    import pyarrow as pa

    table = pa.table(
        {"who": ["a", "b"] * 20, "x": [0.5 * k for k in range(40)], "y": [0, 1, 1, 0] * 10}
    )
    check(
        len(federation_from_frame(table, client="who", target="y").clients) == 2,
        "a table is not read",
    )
    for extra, call in functions(run):
        try:
            call()
        except fedclade.MissingExtraError as error:
            check(
                f"pip install 'fedclade[{extra}]'" in str(error),
                f"expected the extra {extra}, got: {error}",
            )
        else:
            check(False, f"something works that should need the extra {extra}")


def check_commands() -> None:
    """Run every command: it works, or it says in a line which extra it needs, and fails."""
    Path("my.toml").write_text(TOML)
    Path("held.toml").write_text(f"{TOML}\n[newcomers]\nclients = 1\n")
    covered = {arguments[0] for arguments in [*WORKS, *(arguments for _, arguments in NEEDS)]}
    check(not (new := commands() - covered), f"nothing here runs the commands {new}")
    for arguments in WORKS:
        status, out, err = command(arguments)
        check(status == 0, f"fedclade {' '.join(arguments)}: exit status {status}\n{out}{err}")
    status, out, err = command(["reproduce", "--list"])
    needs = "fedclade reproduce needs the package 'fedclade-papers'; install it with: pip install fedclade-papers"
    check(
        (status, err) == (2, f"error: {needs}\n"),
        f"fedclade reproduce: exit status {status}\n{out}{err}",
    )
    for extra, arguments in NEEDS:
        status, out, err = command(arguments)
        what = f"fedclade {' '.join(arguments)}: exit status {status}\n{out}{err}"
        check(status == 2, what)
        check(
            err.startswith("error: ") and err.count("\n") == 1, f"more than a line, or none: {what}"
        )
        check(f"pip install 'fedclade[{extra}]'" in err, f"expected the extra {extra}: {what}")


if __name__ == "__main__":
    check_imports()
    check_python()
    check_commands()
    print(f"core only: {len(WORKS)} command lines work, {len(NEEDS)} name their extra")
