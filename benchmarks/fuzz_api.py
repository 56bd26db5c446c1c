"""Fuzz test of the Python API: wrong calls must succeed or raise an error of fedclade's classes.

The targets are functions, classes and methods that users call: those of ``fedclade.__all__``, and
those that the documentation imports from fedclade's packages. Each call is a valid call in which
one or two arguments are replaced by odd values: values of a wrong type or shape, out of range, not
finite, empty, huge, masked, sparse or without data, unknown names, or objects that raise an
exception in every operation. Some calls have an unknown argument, or lack an argument. Every
argument of every target is used once before any is used again; the seed determines the order and
the values.

A *raw* exception is a failure: an exception of another class than fedclade's. Two exceptions do not
count: those that an odd object raises itself, and a ``TypeError`` that Python raises for the
signature of a function before the function runs. ``--accepted`` lists calls that succeed, so that
you can check them: some odd values are valid.

Calls run in a child process with limited memory. A call that takes longer than five minutes is a
hang, and the child process is replaced.

    OMP_NUM_THREADS=1 python benchmarks/fuzz_api.py --seed 1 [--calls 1200] [--only simulate] [--accepted]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import inspect
import io
import itertools
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import fedclade
import fedclade.channel
import fedclade.config
import fedclade.core
import fedclade.data
import fedclade.flower
import fedclade.report
import fedclade.runs
import fedclade.sweeps
import fedclade.tasks
from fedclade.core.errors import FedcladeError, shown

SECONDS = 300
"""Seconds after which a call counts as a hang."""

MEMORY = 10 * 2**30
"""Bytes of address space of the child process, of which torch's libraries take a part."""

LONG = ("epochs", "steps", "rounds", "pretrain_scale")
"""Ends of names of settings for which a billion is valid, but would take too long."""

OUTCOMES = ("refused", "accepted", "own", "signature", "raw", "hang")

EXIT = "the child ended"

Given = dict[str, Any]


class OddError(Exception):
    """Exception that odd objects raise."""


class Raising:
    """Object that raises an exception in every operation except ``repr``."""

    def _raise(self, *_: object) -> Any:
        raise OddError("an odd object raised this")

    __len__ = __iter__ = __getitem__ = __bool__ = __call__ = __array__ = __float__ = __index__ = (
        _raise
    )
    __contains__ = __add__ = __lt__ = _raise


# Odd values


def odd_numbers() -> dict[str, Any]:
    """Return numbers that are seldom valid."""
    return {
        **{
            "-1": -1,
            "0": 0,
            "1": 1,
            "10**9": 10**9,
            "2**63": 2**63,
            "-2**70": -(2**70),
            "0.5": 0.5,
            "-0.0": -0.0,
        },
        **{
            "nan": float("nan"),
            "inf": float("inf"),
            "-inf": -float("inf"),
            "1e300": 1e300,
            "5e-324": 5e-324,
        },
        **{
            "np.float32(nan)": np.float32("nan"),
            "np.int64(-7)": np.int64(-7),
            "True": True,
            "1j": 1j,
        },
        **{"99": 99, "np.float64(1e-9)": np.float64(1e-9)},
    }


def odd_texts() -> dict[str, Any]:
    """Return texts that are seldom valid."""
    return {
        **{
            "''": "",
            "'x'": "x",
            "'../x'": "../x",
            "long": "x" * 5000,
            "deep": "x/" * 3000,
            "null": "a\0b",
        },
        **{
            "surrogate": "\ud800",
            "newline": "a\nb",
            "markup": "[/]",
            "'fedagv'": "fedagv",
            "'nan'": "nan",
        },
        **{
            "module": "os:system",
            "no module": "no.such:thing",
            "pattern": "*",
            "'auto'": "auto",
            "'['": "[",
        },
        **{
            "bytes": b"abc",
            "Path": Path("nowhere"),
            "'key=1'": "key=1",
            "'a.b=['": "a.b=[",
            "'1e9999GB'": "1e9999GB",
        },
    }


def odd_arrays() -> dict[str, Any]:
    """Return arrays and tensors that are seldom valid."""
    masked = np.ma.masked_array(np.arange(6.0).reshape(3, 2), mask=np.eye(3, 2))
    return {
        **{
            "ones": torch.ones(2),
            "empty": torch.empty(0),
            "scalar": torch.tensor(1.5),
            "5-d": torch.zeros(1, 2, 1, 2, 1),
        },
        **{
            "meta": torch.empty(3, 2, device="meta"),
            "sparse": torch.eye(3).to_sparse(),
            "nans": torch.full((3, 2), np.nan),
        },
        **{
            "complex": torch.ones(3, 2, dtype=torch.complex64),
            "grad": torch.ones(3, 2, requires_grad=True),
        },
        **{
            "bool": torch.tensor([True, False]),
            "huge ints": torch.tensor([2**62, -(2**62)]),
            "bf16": torch.ones(3).bfloat16(),
        },
        **{
            "masked": masked,
            "objects": np.array([None, "a", 1], dtype=object),
            "texts": np.array(["a", "b"]),
        },
        **{
            "records": np.zeros(3, dtype=[("a", int)]),
            "empty array": np.empty((0, 3)),
            "dates": np.array(["2020"], "M8"),
        },
        **{"infinite": np.array([[np.inf, 1.0]]), "uint64": np.array([2**64 - 1], dtype=np.uint64)},
    }


def odd_collections() -> dict[str, Any]:
    """Return lists and tables that are seldom valid."""
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    itself: list[Any] = []
    itself.append(itself)
    return {
        **{
            "[]": [],
            "[1]": [1],
            "[None]": [None],
            "['x']": ["x"],
            "[-1, 0]": [-1, 0],
            "ragged": [[1, 2], [3]],
        },
        **{
            "()": (),
            "(None, None)": (None, None),
            "{}": {},
            "{'a': 1}": {"a": 1},
            "{1: object}": {1: object()},
        },
        **{
            "{None: None}": {None: None},
            "set": {1, 2},
            "generator": (n for n in range(3)),
            "range": range(10),
        },
        **{
            "nested": nested,
            "itself": itself,
            "[nan]": [float("nan")],
            "{'x': [1]}": {"x": [1]},
            "[[]]": [[]],
        },
        **{
            "[1, 1]": [1, 1],
            "{0: 'a'}": {0: "a"},
            "[2**70]": [2**70],
            "(x, y)": (torch.ones(3, 2), torch.ones(2)),
        },
    }


def odd_objects() -> dict[str, Any]:
    """Return objects that are seldom valid."""
    return {
        **{
            "None": None,
            "object": object(),
            "raising": Raising(),
            "print": print,
            "a class": dict,
            "a module": os,
        },
        **{
            "lambda": lambda *_, **__: None,
            "an error": ValueError("x"),
            "date": datetime.date(2020, 1, 1),
        },
        **{
            "module on meta": nn.Linear(3, 2, device="meta"),
            "module without parameters": nn.Flatten(),
        },
        **{
            "lazy module": nn.LazyLinear(2),
            "module of ints": nn.Linear(3, 2).double(),
            "a task": fedclade.Task(),
        },
        **{
            "an algorithm": fedclade.CFL(),
            "a federation": federation(),
            "a tree": run().tree,
            "a run": run(),
        },
        **{
            "a data set": TensorDataset(torch.zeros(3, 2), torch.zeros(3)),
            "an empty data set": TensorDataset(torch.zeros(0)),
        },
    }


KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "numbers": odd_numbers,
    "texts": odd_texts,
    "arrays": odd_arrays,
    "collections": odd_collections,
    "objects": odd_objects,
}


def kind_of(hint: Any) -> str | None:
    """Return the kind of odd values that is most similar to the type of an argument, or None."""
    for member in (*get_args(hint), hint):
        origin = get_origin(member) or member
        if origin in (int, float, bool):
            return "numbers"
        if origin in (str, Path):
            return "texts"
        if origin in (torch.Tensor, np.ndarray):
            return "arrays"
        if inspect.isclass(origin) and issubclass(origin, Mapping | tuple | list):
            return "collections"
    return None


# Valid calls


@cache
def federation() -> fedclade.Federation:
    """Return a federation of four clients of two kinds, and one newcomer."""
    draw = torch.Generator().manual_seed(0)
    data: dict[str, Any] = {}
    for client in range(5):
        x = torch.randn(16, 3, generator=draw)
        data[f"c{client}"] = x, ((x[:, 0] > 0).long() + client) % 2
    truth = {f"c{client}": client % 2 for client in range(5)}
    return fedclade.federation(
        data, labels=2, newcomers=1, validation_fraction=0.2, true_clusters=truth
    )


@cache
def run() -> fedclade.Run:
    """Return a run of two rounds."""
    return fedclade.simulate(
        fedclade.CFL(eps2=0.01, eps1=9.0), nn.Linear(3, 2), federation(), rounds=2, engine="loop"
    )


@cache
def comparison() -> fedclade.Comparison:
    """Return a comparison of two runs."""
    other = fedclade.simulate("fedavg", nn.Linear(3, 2), federation(), rounds=1, engine="loop")
    return fedclade.Comparison({"cfl": [run()], "fedavg": [other]})


@cache
def frame() -> pa.Table:
    """Return a table of two clients."""
    return pa.table(
        {
            "client": ["a", "b"] * 6,
            "x": [0.5 * n for n in range(12)],
            "y": [n % 2 for n in range(12)],
        }
    )


def config() -> dict[str, Any]:
    """Return a config of one quick run."""
    data = {"name": "digits", "clients": 2, "samples_per_client": 20, "validation_fraction": 0.25}
    return {"rounds": 1, "engine": "loop", "data": data, "model": {"name": "mclr"}}


def simulated() -> Given:
    """Return the arguments of a quick run."""
    return {
        "algorithm": "fedavg",
        "model": nn.Linear(3, 2),
        "federation": federation(),
        "rounds": 1,
        "engine": "loop",
    }


@dataclass(frozen=True)
class Target:
    """A function, a class or a method, with a function that returns valid arguments."""

    name: str
    call: Callable[..., Any]
    given: Callable[[], Given] = dict


def methods_of(
    name: str, make: Callable[[], Any], given: Mapping[str, Callable[[], Given]]
) -> list[Target]:
    """Return targets for methods of an object that is made for each call."""

    def target(method: str, arguments: Callable[[], Given]) -> Target:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(make(), method)(*args, **kwargs)

        call.__signature__ = inspect.signature(getattr(make(), method))  # pyright: ignore[reportFunctionMemberAccess]
        call.__wrapped__ = getattr(type(make()), method, None)  # pyright: ignore[reportFunctionMemberAccess]
        return Target(f"{name}.{method}", call, arguments)

    return [target(method, arguments) for method, arguments in given.items()]


def settings_targets() -> list[Target]:
    """Return the classes of settings and algorithms, which need no or few arguments."""
    needed: Mapping[str, Callable[[], Given]] = {
        "DifferentialPrivacy": lambda: {"clip_norm": 1.0},
        "ExamplePrivacy": lambda: {"clip_norm": 1.0},
        "Oracle": lambda: {"true_clusters": {0: 0, 1: 1, 2: 0, 3: 1}},
    }
    names = [
        name
        for name in fedclade.__all__
        if name[0].isupper() and is_settings(getattr(fedclade, name))
    ]
    found = [Target(name, getattr(fedclade, name), needed.get(name, dict)) for name in names]
    return [
        *found,
        Target("PrivateChoice", fedclade.algorithms.PrivateChoice),
        Target(
            "CentralPrivacy",
            fedclade.channel.CentralPrivacy,
            lambda: {"clip_norm": 1.0, "noise_multiplier": 1.0},
        ),
        Target("Churn", fedclade.runs.Churn),
        Target("Network", fedclade.flower.Network),
        Target("Drift", fedclade.data.Drift, lambda: {"kind": "sudden"}),
        Target("TensorBoardTracker", fedclade.TensorBoardTracker),
        Target("Metric", fedclade.Metric, lambda: {"name": "m", "higher_is_better": True}),
        Target("Task", fedclade.Task),
    ]


def is_settings(value: object) -> bool:
    """Return whether a class is an algorithm, or has settings as keyword arguments only."""
    if not inspect.isclass(value) or issubclass(value, BaseException) or inspect.isabstract(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    by_name = all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    records = (fedclade.EndRecord, fedclade.RoundRecord, fedclade.SplitRecord, fedclade.Updates)
    return (by_name and bool(parameters) and value not in records) or issubclass(
        value, fedclade.Algorithm
    )


def data_targets() -> list[Target]:
    """Return the functions and classes that make federations and pools."""
    pool, made = federation().pool, federation()
    sets = {"train": TensorDataset(torch.ones(6, 3), torch.arange(6) % 2)}
    sets["test"] = sets["train"]
    fields = {
        name: getattr(pool, name)
        for name in ("name", "x", "y", "groups", "train", "test", "outputs")
    }
    return [
        Target(
            "load_federation",
            fedclade.load_federation,
            lambda: {"clients": 4, "samples_per_client": 20},
        ),
        Target(
            "load_federation(shift)",
            fedclade.load_federation,
            lambda: {"clients": 4, "samples_per_client": 20, "shift": "label_swap", "clusters": 2},
        ),
        Target(
            "load_federation(partition)",
            fedclade.load_federation,
            lambda: {"clients": 4, "partition": "dirichlet", "partition_arguments": {"alpha": 1.0}},
        ),
        Target(
            "load_federation(pool)",
            fedclade.load_federation,
            lambda: {"source": pool, "clients": 2},
        ),
        Target(
            "federation",
            fedclade.federation,
            lambda: {"clients": {"a": own_data(), "b": own_data()}},
        ),
        Target(
            "federation(pair)",
            pair_federation,
            lambda: {"x": torch.ones(6, 3), "y": torch.arange(6) % 2},
        ),
        Target("federation(data set)", rows_federation, lambda: {"x": torch.ones(3), "y": 1}),
        Target("federation_from_frame", fedclade.federation_from_frame, lambda: frame_arguments()),
        Target("one_client", fedclade.one_client, lambda: {**sets, "labels": 2}),
        Target("pool_from_torch", fedclade.pool_from_torch, lambda: {"dataset": sets["train"]}),
        Target("Pool", fedclade.Pool, lambda: dict(fields)),
        Target("Federation", fedclade.Federation, lambda: {"pool": pool, "clients": made.clients}),
        Target("View", fedclade.View),
        Target(
            "concepts", fedclade.data.concepts, lambda: {"clients": 2, "samples": 10, "steps": 2}
        ),
        *methods_of(
            "Federation",
            lambda: made,
            {"examples": lambda: {"client": 0, "split": "test"}, "alone": lambda: {"client": 0}},
        ),
        *methods_of(
            "Pool",
            lambda: pool,
            {"scaled": lambda: {"how": "source"}, "inputs": lambda: {"indices": np.arange(2)}},
        ),
    ]


def own_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples of one client."""
    return torch.arange(18.0).view(6, 3), torch.arange(6) % 2


def pair_federation(x: Any, y: Any, task: Any = None) -> Any:
    """Make a federation of a client with these arrays, and another client with valid examples."""
    return fedclade.federation({"a": (x, y), "b": own_data()}, task)


class Rows(torch.utils.data.Dataset[Any]):
    """A data set of six equal examples."""

    def __init__(self, x: Any, y: Any) -> None:
        self.row = x, y

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Any:
        return self.row


def rows_federation(x: Any, y: Any, task: Any = None) -> Any:
    """Make a federation of a client with a data set of equal examples, and another client."""
    return fedclade.federation({"a": Rows(x, y), "b": own_data()}, task)


def frame_arguments() -> Given:
    """Return the arguments of a federation from a data frame."""
    return {"frame": frame(), "client": "client", "target": "y"}


def run_targets() -> list[Target]:
    """Return the functions that make runs, and functions and methods that use a run."""
    tree, late = run().tree, federation().newcomers
    number = itertools.count()
    saved = Path("saved")
    if not saved.exists():
        run().save(saved)
    vector = torch.zeros(8)

    def fresh() -> str:
        return f"out-{os.getpid()}-{next(number)}"

    return [
        *[Target("simulate", fedclade.simulate, simulated)] * 3,
        *settings_runs(),
        Target("compare", fedclade.compare, compared),
        Target(
            "sweep",
            fedclade.sweep,
            lambda: {
                "config": config(),
                "over": ["local.lr=0.1,0.2"],
                "folder": fresh(),
                "trials": 1,
            },
        ),
        Target(
            "assign",
            fedclade.assign,
            lambda: {"run": run(), "newcomers": late, "model": nn.Linear(3, 2)},
        ),
        Target(
            "export_model",
            fedclade.export_model,
            lambda: {"run": run(), "out": f"{fresh()}.safetensors", "node": 0},
        ),
        Target(
            "export_adapter",
            fedclade.export_adapter,
            lambda: {"run": run(), "out": fresh(), "node": 0, "alpha": 1.0},
        ),
        Target(
            "load_adapter",
            fedclade.load_adapter,
            lambda: {"folder": "nowhere", "base": nn.Linear(3, 2)},
        ),
        Target("Run.load", fedclade.Run.load, lambda: {"folder": "saved"}),
        Target("Comparison", fedclade.Comparison, lambda: {"runs": {"a": [run()]}}),
        Target(
            "build_model",
            fedclade.build_model,
            lambda: {"name": "mlp", "input_shape": (3,), "outputs": 2},
        ),
        Target(
            "k_means",
            fedclade.k_means,
            lambda: {"points": np.eye(4), "n_clusters": 2, "draw": np.random.default_rng(0)},
        ),
        *methods_of(
            "Run", run, {"personal": lambda: {"client": 0}, "save": lambda: {"folder": fresh()}}
        ),
        *methods_of(
            "tree",
            lambda: tree,
            {
                "path": lambda: {"client": 0},
                "above": lambda: {"node": 0},
                "children": lambda: {"node": 0},
                "node_for": lambda: {"client": 0},
                "model_for": lambda: {"client": 0},
                "models": lambda: {"nodes": [0]},
                "moved": lambda: {"node": 0, "delta": vector},
                "with_model": lambda: {"node": 0, "params": vector},
                "reassigned": lambda: {"leaf_of": {}},
                "with_newcomers": lambda: {"clients": [9]},
                "without": lambda: {"clients": [0]},
            },
        ),
        Target(
            "ParameterTree.root_only",
            fedclade.ParameterTree.root_only,
            lambda: {"members": [0], "params": vector},
        ),
        Target(
            "ParameterTree.star",
            fedclade.ParameterTree.star,
            lambda: {"clusters": [[0], [1]], "params": vector},
        ),
        *methods_of(
            "Comparison",
            comparison,
            {"table": dict, "save": lambda: {"folder": fresh(), "figure": False}},
        ),
    ]


def compared() -> Given:
    """Return the arguments of a quick comparison."""
    return {
        "methods": ["fedavg"],
        "model": nn.Linear(3, 2),
        "federation": federation(),
        "rounds": 1,
        "engine": "loop",
    }


KNOWN_AS = {
    "LocalTraining": "local",
    "Aggregation": "aggregate",
    "Signature": "signature",
    "Faults": "faults",
    "Adversary": "adversary",
}
"""Argument of ``simulate`` for each class of settings; all other classes are algorithms."""

IN_RUNS = (
    "CFL",
    "ReplicatedCFL",
    "IFCA",
    "FLHC",
    "FLUX",
    "PACFL",
    "FedGroup",
    "FedSoft",
    "FedBuff",
    *KNOWN_AS,
)


def settings_runs() -> list[Target]:
    """Return runs of two rounds with one changed setting of an algorithm or another class."""

    def target(kind: str, name: str, hint: Any) -> Target:
        def call(value: Any) -> Any:
            settings = {KNOWN_AS.get(kind, "algorithm"): getattr(fedclade, kind)(**{name: value})}
            return fedclade.simulate(**{**simulated(), "rounds": 2, **settings})

        call.__annotations__["value"] = hint
        default = inspect.signature(getattr(fedclade, kind)).parameters[name].default
        return Target(f"simulate({kind}.{name})", call, lambda: {"value": default})

    hints = {kind: get_type_hints(getattr(fedclade, kind).__init__) for kind in IN_RUNS}
    return [
        target(kind, name, hint)
        for kind in IN_RUNS
        for name, hint in hints[kind].items()
        if name != "return"
    ]


def config_targets() -> list[Target]:
    """Return the functions that read configs, tasks and sweeps, and the apps of a network."""
    own = Path("own.toml")
    if not own.exists():
        own.write_text('rounds = 1\n[model]\nname = "mclr"\n')
        Path("scenario.toml").write_text("rounds = 1\n[algorithms]\nfedavg = {}\ncfl = {}\n")
    spec = {"model": nn.Linear(3, 2), "data_fn": lambda context: federation()}
    return [
        Target("read_config", fedclade.config.read_config, lambda: {"path": "own.toml"}),
        Target("check_config", fedclade.config.check_config, lambda: {"raw": config()}),
        Target(
            "check_config(value)",
            lambda section, key, value: fedclade.config.check_config({section: {key: value}}),
            lambda: {"section": "local", "key": "lr", "value": 0.1},
        ),
        Target(
            "read_scenarios",
            fedclade.config.read_scenarios,
            lambda: {"path": Path("scenario.toml")},
        ),
        Target("find_config", fedclade.config.find_config, lambda: {"name": "own.toml"}),
        Target("build_task", fedclade.tasks.build_task, lambda: {"name": "classification"}),
        Target("parse_over", fedclade.sweeps.parse_over, lambda: {"over": ["local.lr=0.1,0.2"]}),
        Target("client_app", fedclade.flower.client_app, lambda: dict(spec)),
        Target(
            "server_app",
            fedclade.flower.server_app,
            lambda: {"algorithm": "fedavg", "model": nn.Linear(3, 2)},
        ),
        Target("LoRA", fedclade.LoRA, lambda: {"targets": ("0",)}),
    ]


def all_targets() -> list[Target]:
    """Return all targets."""
    return [*settings_targets(), *data_targets(), *run_targets(), *config_targets()]


# One call


@dataclass(frozen=True)
class Call:
    """A call: its number, the index of its target, the replaced argument, and the seed."""

    number: int
    target: int
    argument: str
    seed: int


@dataclass
class Result:
    """Outcome of a call."""

    number: int
    told: str
    outcome: str
    detail: str = ""


def arguments_of(target: Target) -> dict[str, Any]:
    """Return the types of a target's arguments by name, also those of ``**options``."""
    signature = inspect.signature(target.call)
    taker = getattr(target.call, "__wrapped__", None) or target.call
    try:
        hints = get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)
    except (NameError, TypeError, AttributeError):
        hints = {}
    found: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, Any)
        if get_origin(hint) is Unpack:
            found |= get_type_hints(get_args(hint)[0])
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            found[name] = hint
    return found


def odd_value(hint: Any, draw: np.random.Generator) -> tuple[str, Any]:
    """Return the name of an odd value, and the value; half of the values are of a similar type."""
    near = kind_of(hint)
    kind = near if near is not None and draw.random() < 0.5 else str(draw.choice(list(KINDS)))
    values = KINDS[kind]()
    name = str(draw.choice(list(values)))
    return f"{kind}: {name}", values[name]


def prepared(call: Call, targets: list[Target]) -> tuple[str, Given]:
    """Return a description of a call, and its arguments."""
    draw = np.random.default_rng([call.seed, call.number])
    target = targets[call.target]
    known, given, told = arguments_of(target), target.given(), list[str]()
    names = [call.argument]
    if len(known) > 1 and draw.random() < 0.15:
        names.append(str(draw.choice(list(known))))
    for name in dict.fromkeys(names):
        value_name, value = odd_value(known.get(name, Any), draw)
        takes_long = name.endswith(LONG) or target.name.rstrip(")").endswith(LONG)
        if value_name == "numbers: 10**9" and takes_long:
            continue
        given[name] = value
        told.append(f"{name}={value_name}")
    kind = draw.random()
    if kind < 0.03:
        given[f"{call.argument}x"] = 1
        told.append(f"{call.argument}x=1")
    elif kind < 0.05 and given:
        missing = str(draw.choice(list(given)))
        del given[missing]
        told.append(f"without {missing}")
    return f"{target.name}({', '.join(told)})", given


def outcome_of(target: Target, given: Given) -> tuple[str, str]:
    """Make a call; return the outcome, and the result, message or traceback."""
    quiet = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            warnings.simplefilter("ignore")
            found = target.call(**given)
        return "accepted", shown(found)
    except FedcladeError as error:
        return "refused", str(error)
    except OddError:
        return "own", ""
    except TypeError as error:
        steps = traceback.extract_tb(error.__traceback__)
        if not any(
            "/fedclade/" in step.filename and "benchmarks" not in step.filename for step in steps
        ):
            return "signature", str(error)
        return "raw", traceback.format_exc(limit=-5)
    except (Exception, SystemExit):
        return "raw", traceback.format_exc(limit=-5)


def work(pipe: Connection, folder: str) -> None:
    """Make the calls that are received from a pipe, in a folder."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    os.chdir(folder)
    targets = all_targets()
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        told, given = prepared(call, targets)
        pipe.send(told)  # before the call, which may end the process
        outcome, detail = outcome_of(targets[call.target], given)
        pipe.send(Result(call.number, told, outcome, detail))


@dataclass
class Child:
    """Child process that makes the calls, and is replaced if it hangs or dies."""

    folder: str
    pipe: Connection = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a process."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.folder))
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def result(self, call: Call) -> Result:
        """Make a call in the process, and return its result."""
        told = ""
        try:
            self.pipe.send(call)
            told = self.pipe.recv()
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
            why = "hang"
        except (EOFError, OSError):
            why = "raw"
        self.process.kill()
        self.process.join()
        self.start()
        return Result(call.number, told, why, "" if why == "hang" else EXIT)

    def end(self) -> None:
        """End the process."""
        self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


def calls(seed: int, count: int, only: str) -> Iterator[Call]:
    """Yield the calls of a seed; each argument of each target is used before any is repeated."""
    draw = np.random.default_rng(seed)
    targets = all_targets()
    places = [
        (place, name)
        for place, target in enumerate(targets)
        if only in target.name
        for name in (arguments_of(target) or ["x"])
    ]
    number = 0
    while True:
        for place in draw.permutation(len(places)).tolist():
            if number == count:
                return
            yield Call(number, *places[place], seed)
            number += 1


def main() -> None:
    """Make the calls, and print their outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1200, help="number of calls (default: 1200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the calls (default: 0)")
    parser.add_argument(
        "--only", default="", help="call only targets whose names contain this text"
    )
    parser.add_argument("--accepted", action="store_true", help="also list calls that succeed")
    parser.add_argument(
        "--refused", action="store_true", help="also list calls that raise the expected errors"
    )
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ.pop("FEDCLADE_DATA_DIR", None)
    folder = tempfile.mkdtemp(prefix="fuzz-api-")
    counts: Counter[str] = Counter()
    before = Path.cwd()
    os.chdir(folder)  # files of valid arguments are made in this folder
    listed = {"raw", "hang"}
    listed |= {"accepted"} if arguments.accepted else set()
    listed |= {"refused", "signature", "own"} if arguments.refused else set()
    child = Child(folder)
    try:
        for call in calls(arguments.seed, arguments.calls, arguments.only):
            result = child.result(call)
            counts[result.outcome] += 1
            if result.outcome in listed:
                print(
                    f"{result.outcome} {result.number}: {result.told}\n    {result.detail}",
                    flush=True,
                )
    finally:
        child.end()
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    title = f"{sum(counts.values())} calls, seed {arguments.seed}"
    table = Table(*OUTCOMES, title=title)
    table.add_row(*(str(counts[outcome]) for outcome in OUTCOMES))
    Console(width=100).print(table)
    sys.exit(bool(counts["raw"] or counts["hang"]))


if __name__ == "__main__":
    main()
