"""Import of torch at its first use.

``import torch`` takes longer than all that a command does to check a config, and most configs are
checked without torch. After :func:`defer_torch`, the statement ``import torch`` is fast: it returns
a substitute, which imports torch as soon as one of torch's attributes or submodules is needed.
:class:`importlib.util.LazyLoader` does not fit, since it imports a module when a second module
imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

_NAME = "torch"


def defer_torch() -> None:
    """Let ``import torch`` import torch at its first use, unless torch is imported already."""
    if _NAME in sys.modules:
        return
    spec = find_spec(_NAME)
    if spec is None:  # then `import torch` raises its usual error
        return
    substitute = _DeferredTorch(spec)
    sys.meta_path.insert(0, _SubmoduleFinder(substitute))
    sys.modules[_NAME] = substitute


class _DeferredTorch(ModuleType):
    """Module that takes the place of torch until one of torch's attributes is needed."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        self.__spec__ = spec
        self.__path__ = []  # the import system looks for submodules with the finder
        self._taking_over = Lock()
        self._is_ready = True  # from now on, attributes are set in torch

    def __getattr__(self, name: str) -> Any:
        """Import torch, and return its attribute; called for attributes that are not set here."""
        return getattr(self.load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_ready" in vars(self):
            setattr(self.load(), name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.load(), name)

    def load(self) -> ModuleType:
        """Return torch, which is imported at the first call."""
        # The lock is not held during the import: another thread that imports a part of torch would
        # wait for it, while the import waits for this part. The import system has its own locks.
        with self._taking_over:
            is_first = sys.modules.get(_NAME) is self
            if is_first:
                del sys.modules[_NAME]
        torch = import_module(_NAME)
        if is_first:
            self._replace_in_modules(torch)
        return torch

    def _replace_in_modules(self, torch: ModuleType) -> None:
        """Let modules that have imported this substitute use torch itself, which is faster."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if names.get(_NAME) is self:
                names[_NAME] = torch


class _SubmoduleFinder(MetaPathFinder):
    """Finder that imports torch before a submodule of torch, such as ``torch.nn``, is imported."""

    def __init__(self, substitute: _DeferredTorch) -> None:
        self._substitute = substitute

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a submodule of torch; None for modules of other packages."""
        if path or not name.startswith(f"{_NAME}."):  # only the substitute's path is empty
            return None
        self._substitute.load()
        module = sys.modules.get(name)
        if module is None:
            return find_spec(name)
        # Torch itself has imported the submodule, which should not be executed again. The import
        # system goes on with the spec of the module, in place of the returned spec.
        module.__spec__ = ModuleSpec(name, _LoadedModule(module))
        return module.__spec__


class _LoadedModule(Loader):
    """Loader that returns a module which is already loaded, and leaves it unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the loaded module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec."""
        module.__spec__ = self._spec
