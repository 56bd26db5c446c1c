"""Declarations of all commands: their names, options and help.

The module imports nothing that takes long, so that ``--help`` and shell completion are fast. The
module that carries out a command is imported when the command is called.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fedclade.cli import options
from fedclade.cli.deferred_torch import defer_torch
from fedclade.cli.options import Kind, Sampler
from fedclade.report.page import PORT


@contextmanager
def _no_collection() -> Generator[None]:
    """Turn off garbage collection, for imports: they leave no garbage, but start collections.

    Later collections do not look at the imported objects, either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def implemented_in(
    module: str, *, defers_torch: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for the declaration of a command that another module carries out.

    Parameters
    ----------
    module
        Full name of the module with a function of the same name as the declaration. It is called
        with the options of the command as keyword arguments.
    defers_torch
        Whether torch is imported at its first use, for a command that can do without it, and
        without computing anything.
    """

    def decorate(declaration: Callable[..., None]) -> Callable[..., None]:
        @wraps(declaration)
        def call(**options: Any) -> None:
            if defers_torch:
                defer_torch()
                # The matrix library of NumPy would start a thread for each core.
                os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            with _no_collection():
                command = getattr(import_module(module), declaration.__name__)
            command(**options)

        vars(call)["module"] = module
        return call

    return decorate


Files = Annotated[
    list[str],
    typer.Argument(metavar="FILES...", help="Tables, a pattern in quotes, or a folder of tables."),
]
Client = Annotated[
    str | None,
    typer.Option(
        "--client", help="Column with the client of a row. Default: each file, or a guess."
    ),
]
Target = Annotated[
    str | None, typer.Option("--target", help="Column to predict. Default: a guess.")
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Encoding, as 'cp1252'. Default: detected.")
]
Separator = Annotated[
    str | None, typer.Option("--separator", help="Character between cells. Default: detected.")
]
Decimal = Annotated[
    str | None, typer.Option("--decimal", help="Decimal mark, '.' or ','. Default: detected.")
]
Dates = Annotated[
    str | None, typer.Option("--dates", help="Format of dates, as '%d.%m.%Y'. Default: detected.")
]


@implemented_in("fedclade.cli.compare")
def demo(
    out: options.Out = None,
    engine: options.Engine = None,
    memory: options.Memory = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare FedAvg, CFL, the oracle and local training on handwritten digits with swapped labels.

    Four groups of clients each swap another pair of labels. The digits come with scikit-learn; the
    demo takes less than a minute.
    """


@implemented_in("fedclade.cli.example")
def copy_example(
    name: Annotated[str, typer.Argument(help="Name of the example: hospitals.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to create (default: the name of the example)."),
    ] = None,
) -> None:
    """Copy an example data set with a config into a new folder.

    Example: fedclade example hospitals --out hospitals
    """


@implemented_in("fedclade.cli.inspect")
def inspect_tables(
    files: Files,
    client: Client = None,
    target: Target = None,
    encoding: Encoding = None,
    separator: Separator = None,
    decimal: Decimal = None,
    dates: Dates = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Also write a page.")
    ] = None,
) -> None:
    """Show the clients, columns and problems of tables, without training.

    Example: fedclade inspect hospitals/*.csv --out hospitals.html
    """


@implemented_in("fedclade.cli.inspect")
def init_config(
    files: Files,
    client: Client = None,
    target: Target = None,
    encoding: Encoding = None,
    separator: Separator = None,
    decimal: Decimal = None,
    dates: Dates = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="CONFIG.toml",
            help="File to write; it must not exist yet. Default: the name of the folder or file.",
        ),
    ] = None,
) -> None:
    """Write a config for tables, in which each assumption is a line that you can change.

    Example: fedclade init hospitals/*.csv --target readmitted --out hospitals.toml
    """


@implemented_in("fedclade.cli.advise")
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


@implemented_in("fedclade.cli.run")
def run_config(
    config: options.ConfigFile,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    actors: options.Actors = None,
    actor_cores: options.ActorCores = None,
    ray_address: options.RayAddress = None,
    memory: options.Memory = None,
    dashboard: options.Dashboard = False,
    port: options.Port = PORT,
    log: options.Log = None,
    quiet: options.Quiet = False,
) -> None:
    """Run one config, and store its results in a run folder.

    Example: fedclade run configs/cfl-mnist-label-swap.toml --data-dir DIR --seed 1 --set
    algorithm.eps2=0.9
    """


@implemented_in("fedclade.cli.run")
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of an interrupted or finished run.")],
    data_dir: options.DataDir = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", help="Total number of rounds, if more than the run was started with."
        ),
    ] = None,
    app: Annotated[
        Path | None,
        typer.Option(
            "--app",
            metavar="DIR",
            help="Run of a network: folder of its Flower app, which 'flwr run' starts again.",
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            metavar="NAME",
            help="With --app: name of the SuperLink in Flower's config. Default: Flower's default.",
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Train no further round; evaluate and finish the run as it is."
        ),
    ] = False,
    device: options.Device = "auto",
    actors: options.Actors = None,
    actor_cores: options.ActorCores = None,
    ray_address: options.RayAddress = None,
    memory: options.Memory = None,
    dashboard: options.Dashboard = False,
    port: options.Port = PORT,
    log: options.Log = None,
    trust: options.Trust = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue a run from its last checkpoint; the results are those of an uninterrupted run.

    The config is the run's own; the data is loaded as by 'fedclade run'. A finished run
    continues from its end if --rounds is larger than its number of rounds, or if the training of
    its references was interrupted. With --finish, an interrupted run is evaluated after the last
    saved round and its results are written, so that it can be exported, reported and compared.

    The run of a network continues with its clients: --app starts its ServerApp again, by
    'flwr run', with the run's own settings.

    Example: fedclade resume runs/cfl-mnist-label-swap-seed0 --rounds 100 --data-dir DIR
    """


@implemented_in("fedclade.cli.compare")
def compare(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="TOML files, folders of them, or names of configs in 'fedclade ls configs'."
        ),
    ],
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", min=1, help="Runs of each config, with seeds 0, 1, ... Default: 1."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale", help="Size of scenarios, such as smoke or laptop. Default: full size."
        ),
    ] = None,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    log: options.Log = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the comparison in --out: finished runs are read, others are continued.",
        ),
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Run only runs whose names match, such as '*rcfl*'; results of others are read. "
            "With the suite natural: names of data sets, such as heart,exam.",
        ),
    ] = "*",
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="NAMES",
            help="With the suite natural: names of methods, such as fedavg,rcfl; also your own "
            "as module:object. Default: all methods of the suite.",
        ),
    ] = None,
    at_most: Annotated[
        float | None,
        typer.Option(
            "--at-most", metavar="MINUTES", min=0, help="Start no further run after this time."
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Run several configs, each with several seeds, and compare them in a table.

    The table has 95 % intervals over the seeds. The gap closed is (method - FedAvg) / (oracle -
    FedAvg); it needs a FedAvg and an oracle config with the same data.

    Scenarios, such as those in configs/suite, run several algorithms on the same task, and get a
    table each. Several scenarios also get mean ranks, with a critical-difference diagram in
    ranks.png, and a table with published figures if their files contain some.
    Example: fedclade compare suite --scale smoke

    Many runs can be divided among several calls, also in parallel, with the same folder.
    Example: fedclade compare arena --out arena --resume --only '*P(Y|X) 8*' --at-most 10

    In the suite natural, data sets with real clients, every method is first tuned on validation
    data with the same number of runs. The same command continues where it stopped.
    Example: fedclade compare natural --only heart,exam --methods fedavg,rcfl,ditto --out natural
    """


@implemented_in("fedclade.cli.sweep")
def sweep_config(
    config: options.ConfigFile,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=VALUES",
            help="Config key to vary, with its values: 'local.lr=0.01..0.3(log)' is a range on a "
            "logarithmic scale, 'local.epochs=1..5' a range of whole numbers, and "
            "'model.name=mlp,cnn' a list. Can be repeated.",
        ),
    ],
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", min=1, help="Number of trials. Default: 20, or all combinations of a grid."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            min=1,
            help="Runs of each trial, with seeds 0, 1, ...; their mean is the score.",
        ),
    ] = 1,
    sampler: Annotated[
        Sampler,
        typer.Option(
            "--sampler", help="Sampler of the trials; only tpe uses the scores of earlier trials."
        ),
    ] = Sampler.TPE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampler.")] = 0,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="Metric on validation data to optimize. Default: the first metric of the task.",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Number of parallel trials on this machine.")
    ] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run trials as tasks on a Ray cluster; see --actors.")
    ] = False,
    actors: Annotated[
        int | None, typer.Option("--actors", min=1, help="Number of parallel trials with --ray.")
    ] = None,
    actor_cores: Annotated[
        int | None, typer.Option("--actor-cores", min=1, help="CPU cores of each trial with --ray.")
    ] = None,
    ray_address: options.RayAddress = None,
    out: options.Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the sweep in --out: finished trials are read, others are continued.",
        ),
    ] = False,
    data_dir: options.DataDir = None,
    rounds: options.Rounds = None,
    override: options.Set = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    quiet: options.Quiet = False,
) -> None:
    """Search for the settings of a config with the best score on validation data.

    Clients need validation data, such as with --set data.validation_fraction=0.2. Test data are not
    used for the search.

    'fedclade report' compares the trials in the folder, and 'fedclade run' takes best.toml, the
    best config.

    Example: fedclade sweep my.toml --over "local.lr=0.01..0.3(log)" --trials 20
    """


@implemented_in("fedclade.cli.assign")
def assign_newcomers(
    folder: options.RunFolder,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="TOML file whose clients are the newcomers, in place of those held back.",
        ),
    ] = None,
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write, .csv or .json. Default: RUN/newcomers.csv and RUN/newcomers.json.",
        ),
    ] = None,
    device: options.Device = "auto",
    engine: options.Engine = None,
    memory: options.Memory = None,
    without_labels: Annotated[
        bool,
        typer.Option(
            "--without-labels",
            help="Assign without labels, by features of the root model and data of the run's clients.",
        ),
    ] = False,
    only_fitting: Annotated[
        bool,
        typer.Option(
            "--only-fitting",
            help="Assign the deepest model that fits, in place of that of the reached leaf.",
        ),
    ] = False,
    trust: options.Trust = False,
) -> None:
    """Assign newcomers to the clusters of a finished run, and evaluate the assigned models.

    Newcomers are the clients that the run's config held back (newcomers.clients = 10), or those of
    another config.
    """


@implemented_in("fedclade.cli.predict")
def predict_rows(
    folder: options.RunFolder,
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS", help="CSV, TSV or Parquet file with the rows.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="New .csv, .parquet or .json file to write."),
    ],
    client: options.Client = None,
    node: options.Node = None,
    level: options.Level = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="COLUMN",
            help="Column of the rows to repeat in the result, such as an id; can be repeated.",
        ),
    ] = None,
    device: options.Device = "auto",
    trust: options.Trust = False,
) -> None:
    """Predict the targets of new rows by a client's model, and write them to a table.

    The rows need the input columns of the run, and may have others. They are encoded and scaled as
    in the run; predictions are in its labels and units.

    Example: fedclade predict RUN rows.csv --client hospital-3 --out predictions.csv
    """


@implemented_in("fedclade.cli.predict")
def evaluate_data(
    folder: options.RunFolder,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Config with data of the run's clients; or a file or pattern of files with the "
            "columns of the run.",
        ),
    ],
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="Rows to evaluate: train, validation, test or all. Default: the test rows of a "
            "config, and all rows of files.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="New .csv, .parquet or .json file to write."),
    ] = None,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    trust: options.Trust = False,
) -> None:
    """Evaluate the models of a finished run on new data of its clients, without any training.

    Each client is evaluated with its own model of the run. Clients are recognized by their names.
    The run may have 0 rounds: its initial models are then evaluated.

    Example: fedclade evaluate RUN "next-month/*.csv" --out scores.csv
    """


@implemented_in("fedclade.cli.report")
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folder; or, to compare runs, several of them or the folder of a comparison.",
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Run of the same clients to compare scores with, such as one of FedAvg.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="File to write. Default: RUN/report.html for one run, ./report.html for several.",
        ),
    ] = None,
    references: Annotated[
        bool,
        typer.Option(
            "--references",
            help="Also train the references, each client alone and one model for all, and compare "
            "the run with them.",
        ),
    ] = False,
    attributes: Annotated[
        Path | None,
        typer.Option(
            "--attributes",
            metavar="FILE",
            help="Table with a row of attributes for each client, in which clusters may differ.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            metavar="DIR",
            help="Also write the figures to this folder as PDF, with embedded fonts, for papers.",
        ),
    ] = None,
    latex: Annotated[
        bool,
        typer.Option(
            "--latex",
            help="Print the comparison as a LaTeX table, and write no page. Runs that differ only "
            "in their seed share a row.",
        ),
    ] = False,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    trust: options.Trust = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Serve the report of a run that is on, until Ctrl-C, to browsers on this machine.",
        ),
    ] = False,
    port: options.Port = PORT,
) -> None:
    """Write the report of a run as one HTML page, print its tables, and draw its figures again.

    The page needs no network connection. Several runs, or the folder of 'fedclade compare' or
    'fedclade demo', are compared on one page. The table of clients is also written as
    RUN/gains.csv. The report of an unfinished run shows its newest checkpoint.

    With --references, two references are trained on the data of the run's config and stored in the
    run folder: a model of each client alone, and one model for all clients. --data-dir, --device
    and --trust are for this training, and have no effect without --references.

    With --latex, the mean ± standard deviation over seeds of each method is printed for a paper. The
    best mean is bold if it is significantly better than all others (docs/papers.md).

    With --live, the report of a run is served on http://127.0.0.1:8321 instead, and shows each new
    checkpoint; the run may be that of a network, in another process. --port is for --live only.

    Examples: fedclade report RUN --against FEDAVG_RUN --open; fedclade report A B C --out abc.html;
    fedclade report RUN --references --attributes sites.csv; fedclade report A B --latex > table.tex;
    fedclade report RUN --figures figures
    """


@implemented_in("fedclade.cli.report")
def tree(folder: options.RunFolder) -> None:
    """Print the parameter tree of a run: its clusters, their members and the splits.

    For an unfinished run, the tree is that of its newest checkpoint.
    """


@implemented_in("fedclade.cli.report")
def export(
    folder: options.RunFolder,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            help="New .safetensors or .onnx file to write; with --adapter, a new folder.",
        ),
    ],
    client: options.Client = None,
    node: options.Node = None,
    level: options.Level = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help="Export only the adapter, as a folder for peft and fedclade.load_adapter.",
        ),
    ] = False,
    trust: options.Trust = False,
) -> None:
    """Write one model of a run as a state dict for plain PyTorch, with a model card.

    A file that ends in .onnx gets the model in the format ONNX, with the scaling of its inputs and
    the unit of its targets; this needs the packages of: pip install fedclade[onnx]

    Example: fedclade export RUN --client hospital-3 --out hospital-3.safetensors; then, in Python,
    model.load_state_dict(safetensors.torch.load_file("hospital-3.safetensors"))
    """


@implemented_in("fedclade.cli.validate", defers_torch=True)
def validate(
    config: options.ConfigFile,
    data_dir: options.DataDir = None,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Check the config alone, and open no data.")
    ] = False,
) -> None:
    """Check a config and open its data, without training; report all errors of the config at once.

    Your own data is opened unless --without-data is set; a data set of fedclade only with --data-dir.
    """


@implemented_in("fedclade.cli.ls")
def list_known(
    kind: Annotated[
        Kind | None, typer.Argument(help="Kind of entries to list. Default: all.")
    ] = None,
) -> None:
    """List algorithms, data sets, models and more, built in or from installed packages.

    Packages add entries with the entry points fedclade.algorithms, fedclade.models and so on.

    Your own code needs no package: wherever a config takes a name, it also takes module:name.

    For example, my_methods:KMeans is the class KMeans in the current folder's my_methods.py.

    Example: fedclade ls algorithms
    """


@implemented_in("fedclade.cli.report")
def cite(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RUN",
            help="Name of an algorithm, data set, partition or model, or fedclade; or a run folder, "
            "or the folder of a comparison.",
        ),
    ],
) -> None:
    """Print BibTeX entries: of an algorithm, a data set or a model, or of all that a run used.

    For a run, the entries are those of fedclade, the method, the data, the privacy mechanism and
    its accountant, secure aggregation, and so on. A name comes before a folder of the same name:
    write ./cfl for a folder named cfl.

    Examples: fedclade cite cfl; fedclade cite RUN > run.bib
    """


@implemented_in("fedclade.cli.data")
def build(
    source: Annotated[
        str,
        typer.Argument(
            help="Config, name of a data set in 'fedclade ls datasets', files, folder of files, or 'planted'."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist yet.")],
    data_dir: options.DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    override: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write the clients' data into a folder that runs can map into memory, in place of loading it.

    To use the folder, set folder = "DIR" in the section "data" of a config. Leave out the keys
    that divide data among clients, such as partition.

    'planted' generates synthetic clients: --set data.clients=1000000 --set data.clusters=4.

    Example: fedclade data build planted --out million --set data.clients=1000000
    """


@implemented_in("fedclade.cli.data")
def schema(
    source: Annotated[str, typer.Argument(help="Config, files, or folder of files.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; it must not exist yet.")],
    data_dir: options.DataDir = None,
    override: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write the schema of tables: columns, categories, labels and words for encoding the data.

    To use the schema, set schema = "FILE" in the section "data" of a config. In a federation over a
    network, only the server needs the file. The file contains values of the data: check it before
    you share it, and add values that only other clients have.

    Example: fedclade data schema hospitals/hospitals.toml --out schema.json
    """
