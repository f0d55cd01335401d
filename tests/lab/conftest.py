"""Fixtures of the tests on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts import Lab, hosts
from tests.lab.faults import Table


@pytest.fixture
def table(record_property: Callable[[str, object], None]) -> Table:
    return Table(record_property)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Lab]:
    """Two hosts."""
    with hosts(2, tmp_path) as lab:
        yield lab


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Lab]:
    """Three hosts."""
    with hosts(3, tmp_path) as lab:
        yield lab
