"""The statement `import torch` is fast until something of torch is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys
from fedclade.cli.deferred_torch import defer_torch
defer_torch()
import torch
assert "torch.nn" not in sys.modules
deferred = torch
"""


def run(code: str, folder: Path | None = None) -> str:
    """Run a program that defers torch, with modules of a folder; return its error output."""
    path = "" if folder is None else f"import sys; sys.path.insert(0, {str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{path}\n{BEGIN}\n{code}"], capture_output=True, text=True
    )
    return done.stderr


@pytest.fixture
def small_torch(tmp_path: Path) -> Path:
    """Return a folder with a small package named torch, which is imported in no time."""
    package = tmp_path / "torch"
    (package / "nn").mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import nn\nTensor = int\n")
    (package / "nn" / "__init__.py").write_text("from torch.nn import functional\n")
    (package / "nn" / "functional.py").write_text("from torch import nn\n")
    (package / "rare.py").write_text("from torch import Tensor\n")
    return tmp_path


@pytest.mark.parametrize(
    "use",
    [
        "torch.Tensor",
        "from torch import Tensor",
        "import torch.nn",
        "from torch.nn import functional",
        "import torch.nn.functional as functional",
        "import torch.rare",
        "torch.extra = 1",
    ],
)
def test_torch_is_imported_at_its_first_use(use: str, small_torch: Path):
    """Each part of it once, and the modules that have imported it refer to it from then on."""
    check = """
torch = sys.modules["torch"]
assert type(torch) is type(sys) and torch is not deferred
assert torch.nn is sys.modules["torch.nn"] is deferred.nn
assert torch.nn.functional is sys.modules["torch.nn.functional"]
assert torch.nn.functional.nn is torch.nn
assert torch.nn.__spec__.loader.path == torch.nn.__file__
assert module.torch is torch
import torch.rare
assert torch.rare is deferred.rare is sys.modules["torch.rare"]
deferred.extra = 2
assert torch.extra == 2
del deferred.extra
assert not hasattr(torch, "extra")
"""
    module = "module = sys.modules['module'] = type(sys)('module'); module.torch = torch"
    assert run(f"{module}\n{use}\n{check}", small_torch) == ""


def test_threads_may_use_torch_at_the_same_time(small_torch: Path):
    (small_torch / "torch" / "nn" / "functional.py").write_text("import time; time.sleep(0.2)\n")
    code = """
import threading
def by_submodule():
    from torch.nn import functional
def by_attribute():
    assert deferred.Tensor is int
def by_import():
    import torch.rare
threads = [threading.Thread(target=use) for use in (by_submodule, by_attribute, by_import) * 3]
for thread in threads: thread.start()
for thread in threads: thread.join(20)
assert not any(thread.is_alive() for thread in threads)
assert sys.modules["torch"].nn is sys.modules["torch.nn"]
"""
    assert run(code, small_torch) == ""


def test_errors_of_torch_are_those_of_its_import(small_torch: Path):
    (small_torch / "torch" / "__init__.py").write_text("raise OSError('no libtorch_cpu.so')\n")
    twice = """
for _ in range(2):
    try: torch.Tensor
    except OSError as error: assert str(error) == "no libtorch_cpu.so"
"""
    assert run(twice, small_torch) == ""
    assert run("import torch.nn", small_torch).endswith("OSError: no libtorch_cpu.so\n")


def test_a_missing_part_of_torch_is_an_error(small_torch: Path):
    assert "No module named 'torch.none'" in run("import torch.none", small_torch)
    assert "has no attribute 'none'" in run("torch.none", small_torch)
    assert "cannot import name 'none'" in run("from torch import none", small_torch)


def test_torch_is_not_replaced_if_it_is_imported_already(small_torch: Path):
    code = "torch.Tensor; torch = sys.modules['torch']; defer_torch(); assert sys.modules['torch'] is torch"
    assert run(code, small_torch) == ""


def test_without_torch_its_import_fails_as_usual():
    code = """
import sys, importlib.machinery
sys.path[:] = [each for each in sys.path if "site-packages" not in each]
from importlib.util import spec_from_file_location, module_from_spec
spec = spec_from_file_location("deferred_torch", FILE)
deferred = module_from_spec(spec)
spec.loader.exec_module(deferred)
deferred.defer_torch()
import torch
"""
    from fedclade.cli import deferred_torch

    done = subprocess.run(
        [sys.executable, "-S", "-c", f"FILE = {deferred_torch.__file__!r}\n{code}"],
        capture_output=True,
        text=True,
    )
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'torch'\n")


def test_the_real_torch_can_be_deferred():
    code = """
from torch.utils.data import Dataset
import torch.nn.functional
real = sys.modules["torch"]
assert real.nn is sys.modules["torch.nn"] and real.utils.data is sys.modules["torch.utils.data"]
assert real.nn.functional.relu(deferred.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
"""
    assert run(code) == ""
