"""torch's compiler, loaded by those who compile: not by the first optimizer that is made.

`torch.optim` imports `torch._dynamo` in plain programs, too, only to tell it what it is not to trace. That costs every
process 1.5 s and 71 MB (torch 2.13). Replicas, parameter servers and their driver have a stand-in there, until anything
else is wanted of it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, final

import torch

__all__ = ["defer_compiler"]

_COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"  # where torch keeps what `disable` gave it, on the function
_OF_TORCH = 2  # arguments of its own calls: the function, and whether what that calls is disabled, too


def defer_compiler() -> None:
    """Have this process load torch's compiler when something needs it. Does nothing where it is loaded already."""
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _Deferred()
        sys.meta_path.insert(0, _Finder())


@final
class _Deferred(ModuleType):
    """What plain programs ask of the compiler; whatever else is asked for, the real one answers."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__spec__ = importlib.machinery.PathFinder.find_spec(_COMPILER, torch.__path__)
        self.__path__: list[str] = []  # a package: imports of its modules go through the finder
        self._told: list[Any] = []

    def graph_break(self, *args: Any, **settings: Any) -> None:
        """Nothing is traced."""

    def disable(self, *args: Any, **settings: Any) -> Any:
        """As it is for torch's own functions, which ask again later; a user's are disabled for good."""
        if settings.get("wrapping", True) or len(args) != _OF_TORCH:
            return load_compiler().disable(*args, **settings)
        self._told.append(args[0])
        return args[0]

    def forget(self) -> None:
        """Let torch ask again for each function that it has asked for."""
        for fn in self._told:
            fn.__dict__.pop(_MARK, None)
        self._told.clear()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks at all modules looks for these
            raise AttributeError(name)
        return getattr(load_compiler(), name)


@final
class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets the import of a module of the compiler's load the compiler, and gives what came of that."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib`."""
        if not fullname.startswith(_COMPILER + ".") or path:
            return None  # of the real package, once that is there, or of another one
        load_compiler()
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in sys.modules else _found(fullname)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module, which is loaded already."""
        module = sys.modules[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing but its own spec, in place of that of this import."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def _found(fullname: str) -> importlib.machinery.ModuleSpec | None:
    return importlib.machinery.PathFinder.find_spec(fullname, load_compiler().__path__)


_loading = threading.RLock()


def load_compiler() -> ModuleType:
    """The real one."""
    with _loading:
        deferred = sys.modules.get(_COMPILER)
        if isinstance(deferred, _Deferred):
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
            del sys.modules[_COMPILER], torch._dynamo
            deferred.forget()
        return importlib.import_module(_COMPILER)
