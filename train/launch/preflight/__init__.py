"""`python -m train preflight`: are these hosts fit for a job, each one and between them? README.md tells how.

On each host: what it is like (`facts`, `gpus`), and what comes of calling all others (`calls`). Where all that is
known: what is wrong with whom, and what mends it (`judge`, `findings`). Hosts that were found bad: `quarantine`.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """The command."""
    from train.launch.preflight.command import main

    return main(argv)
