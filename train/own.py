"""Functions of the user's own, named in the config as `module:function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from train.errors import UsageError
from train.rules import nearest


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Import `module:function`; the current folder is searched too. Raises UsageError naming the config's field."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise UsageError(f"{field}: {name}: importing {module_name} failed: {error}") from error
        raise UsageError(
            f"{field}: no module {module_name!r} here (for {name!r}): start in the folder that holds it, "
            "or add that folder to PYTHONPATH"
        ) from None
    except Exception as error:
        raise UsageError(f"{field}: {name}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
        raise UsageError(f"{field}: {module_name} has no function {function_name!r}{nearest(function_name, known)}")
    return function  # type: ignore[no-any-return]
