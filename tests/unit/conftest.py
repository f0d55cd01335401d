"""What all unit tests need."""

from __future__ import annotations

import pytest

from train.eager import keep_compiler_out


@pytest.fixture(scope="session", autouse=True)
def _without_compiler() -> None:
    """As in a rank. And Ansible, which some tests import, changes what torch's compiler cannot bear: sys.intern."""
    keep_compiler_out()
