"""What all unit tests need."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from train.eager import keep_compiler_out


@pytest.fixture(scope="session", autouse=True)
def _without_compiler() -> None:
    """As in a rank."""
    keep_compiler_out()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of one's own, for `my_models:name`."""
    module = ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", module)
    return module
