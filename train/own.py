"""Functions of the user's own, named in the config as `module:function`."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from train.errors import UsageError
from train.rules import nearest


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Import `module:function`; the current folder is searched too. Raises UsageError naming the config's field."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name != error.name and not module_name.startswith(f"{error.name}."):
            raise UsageError(f"{field}: {name}: importing {module_name} failed: {error}{_place(error)}") from error
        if module_name.endswith(".py"):
            raise UsageError(
                f"{field}: {name} names a file; name the module: {module_name.removesuffix('.py')}:{function_name}"
            ) from None
        raise UsageError(
            f"{field}: no module {module_name!r} here (for {name!r}): start in the folder that holds it, "
            "or add that folder to PYTHONPATH"
        ) from None
    except Exception as error:
        words = f"{type(error).__name__}: {error}{_place(error)}"
        raise UsageError(f"{field}: {name}: importing {module_name} failed: {words}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
        raise UsageError(f"{field}: {module_name} has no function {function_name!r}{nearest(function_name, known)}")
    return function  # type: ignore[no-any-return]


def call(section: str, name: str, args: Mapping[str, Any]) -> Any:
    """Import `module:function` and call it. Raises UsageError where it does not take these arguments."""
    function = load_function(f"{section}.name", name)
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise UsageError(f"{section}.args: {name} was given {dict(args)}: {error}") from None
    except ValueError:
        pass  # a builtin has no signature
    return function(**args)


def _place(error: Exception) -> str:
    """Where the user's module failed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}, line {frame.lineno})"
