"""Names of packages that are imported at their first use can be listed, and need no source files."""

from __future__ import annotations

import compileall
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fedclade
import fedclade.data

SOURCE = Path(fedclade.__file__).parent

USE = "import fedclade.core; print(fedclade.core.ConfigError.__name__, fedclade.__file__)"


def run(code: str, path: Path) -> str:
    """Return the output of a program that imports fedclade from a folder or an archive."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(path)},
    )
    return done.stdout.strip()


def test_the_names_of_a_package_are_listed_before_they_are_used():
    code = "import sys, fedclade; print(*dir(fedclade)); assert 'torch' not in sys.modules"
    names = run(code, SOURCE.parent).split()
    assert {*fedclade.__all__, "__version__"} <= {*names}


def test_a_name_with_a_dot_is_no_submodule():
    assert not hasattr(fedclade.data, "sources.nothing")
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing\.at_all'"):
        getattr(fedclade, "nothing.at_all")


def test_a_package_in_an_archive_has_its_names(tmp_path: Path):
    archive = tmp_path / "fedclade.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in SOURCE.rglob("*.py"):
            file.write(path, path.relative_to(SOURCE.parent))
    assert run(USE, archive) == f"ConfigError {archive}/fedclade/__init__.py"


def test_a_package_without_sources_has_its_names(tmp_path: Path):
    copied = tmp_path / "fedclade"
    shutil.copytree(SOURCE / "core", copied / "core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE / "catalogue", copied / "catalogue")
    shutil.copy(SOURCE / "__init__.py", copied)
    compileall.compile_dir(copied, quiet=1, legacy=True)
    for path in copied.rglob("*.py"):
        path.unlink()
    assert run(USE, tmp_path) == f"ConfigError {copied}/__init__.pyc"


def test_a_package_is_pickled_as_its_name():
    """Functions that are sent to actors by value may refer to a package."""
    assert pickle.loads(pickle.dumps(fedclade.data)) is fedclade.data
