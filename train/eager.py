"""Keeps torch's compiler out of a process that compiles nothing: half of what a rank would load before its first step.

torch 2.13 imports all of `torch._dynamo` (2.8 s where `import torch` takes 2.6 s) at the first optimizer, and for DDP,
only to mark functions that nothing will ever trace, and to break a graph that is not there. `keep_compiler_out` puts a
stand-in there that does these few things, which without a compiler mean nothing. Whatever else is asked of it brings in
the real module, as if the stand-in had never been: a user's own `torch.compile` works.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_MARK = "__dynamo_disable"
"""Where torch._compile keeps the marked form of a function."""


def keep_compiler_out() -> None:
    """From now on `torch._dynamo` is a stand-in until somebody needs more of it. Nothing is done if it is loaded."""
    if _NAME not in sys.modules:
        stand_in = _StandIn(_NAME)
        sys.modules[_NAME] = stand_in
        setattr(torch, "_dynamo", stand_in)  # noqa: B010 - torch's own name for it
        sys.meta_path.insert(0, stand_in.finder)


class _StandIn(ModuleType):
    """What torch asks of its compiler where nothing is compiled."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.finder = _SubmoduleFinder(self)
        self._marked: list[Any] = []
        self.utils = _Part(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # its default
        self.trace_rules = _Part(self, "trace_rules", clear_lru_cache=lambda: None)

    def disable(self, fn: Any = None, recursive: bool = True, **others: Any) -> Any:
        """The function that is never to be traced: itself."""
        if not isinstance(fn, Callable):  # type: ignore[arg-type] # used as a decorator with arguments
            return self.real().disable(fn, recursive, **others)
        self._marked.append(fn)
        return fn

    def graph_break(self, *_: Any, **__: Any) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its `__file__`: no reason to load it
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        """The module itself, loaded now in place of this one."""
        if sys.modules.get(_NAME) is self:
            sys.meta_path.remove(self.finder)
            del sys.modules[_NAME]
            delattr(torch, "_dynamo")
            for fn in self._marked:  # torch is to mark them anew, and this time for real
                vars(fn).pop(_MARK, None)
        return importlib.import_module(_NAME)


class _Part:
    """A submodule of the stand-in, with the few names that are asked for."""

    def __init__(self, whole: _StandIn, name: str, **known: Callable[[], Any]) -> None:
        self._whole, self._name = whole, name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._whole.real(), self._name), name)


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import torch._dynamo.config` must find the real one."""

    def __init__(self, whole: _StandIn) -> None:
        self._whole = whole

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_NAME + "."):
            return None
        self._whole.real()
        own_spec = importlib.import_module(fullname).__spec__
        return importlib.machinery.ModuleSpec(fullname, self, loader_state=own_spec)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """It is there already."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """And has run: it only gets its own spec back, which the import machinery has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
