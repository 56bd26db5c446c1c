"""What pages tell their readers to have: each function puts it in the names of the page, or in its folder."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedclade
from fedclade.core import installed
from tests.docs.blocks import ROOT, blocks_of

Names = dict[str, Any]


def federation(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Four clients with digits."""
    names["fedclade"] = fedclade
    names["federation"] = fedclade.load_federation("digits", clients=4, samples_per_client=20)


def plugin(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Have the package of ``examples/plugin`` as if it were installed."""
    _install(ROOT / "examples" / "plugin", patch)


def plugins(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Have the packages of ``examples/plugins`` as if they were installed."""
    for project in (ROOT / "examples" / "plugins").glob("*/pyproject.toml"):
        _install(project.parent, patch)


def pfllib(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Have files as PFLlib writes them, of three clients."""
    draw = np.random.default_rng(0)
    for part, rows in (("train", 30), ("test", 10)):
        folder = Path("dataset/MNIST", part)
        folder.mkdir(parents=True)
        for client in range(3):
            content = {"x": draw.normal(size=(rows, 1, 28, 28)), "y": np.arange(rows) % 10}
            np.savez_compressed(folder / f"{client}.npz", data=content)


def _install(package: Path, patch: pytest.MonkeyPatch) -> None:
    """Have a package as if it were installed, in a folder of the page."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # A folder for each package: Python reads a folder of packages once, and not again.
    site = Path("site-packages") / project["name"]
    # As pip names it: Python takes what is before the first hyphen for the name of the package.
    about = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in things.items())
        for group, things in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("".join(groups))
    for folder in (site, package / "src"):
        patch.syspath_prepend(folder.resolve())
    installed.cache_clear()


def copy_of_plugin(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Be in a copy of that package, which is installed."""
    plugin(names, patch)
    patch.chdir(shutil.copytree(ROOT / "examples" / "plugin", "copy"))


def finished(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Have run folders: of each name that pages call one."""
    first = fedclade.load_federation("digits", clients=4, samples_per_client=20)
    for name in ("RUN", "A", "B", "C", "FEDAVG_RUN", "DEMO/cfl/seed-0"):
        algorithm = "fedavg" if name == "FEDAVG_RUN" else "cfl"
        fedclade.simulate(algorithm, "mclr", first, rounds=2, folder=name, engine="loop")


def own_method(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Have the module with a method of one's own that the page of the natural suite shows."""
    (block,) = (each for each in blocks_of("docs/natural.md") if each.file == "my_methods.py")
    Path("my_methods.py").write_text(block.text, encoding="utf-8")


def training_message(names: Names, patch: pytest.MonkeyPatch) -> None:
    """Have a client's data, and a message that requests training."""
    names["trainset"] = list(range(8))
    names["msg"] = SimpleNamespace(content={"config": {}})
