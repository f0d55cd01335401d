"""What a preflight is asked to look at, and what it holds to be enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Asked:
    """The same on all hosts of a preflight. A floor that is None is only a matter of warnings."""

    device: str = "cpu"
    """What is to be trained on: cpu or cuda."""
    runs_dir: str = "runs"
    min_memlock_mb: int | None = None
    min_shm_mb: int | None = None
    min_nofile: int | None = None
    min_free_mb: int = 1024
    min_mb_per_s: float | None = None
    """Between two hosts, in one direction."""
    max_skew_s: float = 1.0
    """Logs of hosts whose clocks differ by more cannot be read together."""
    patience_s: float = 10.0
    """For the other hosts to come and to answer."""
    reduces: bool = True
    """Whether all hosts also add up over the network, with torch."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, Any]) -> Asked:
        """The other way."""
        return Asked(**{field.name: told[field.name] for field in fields(Asked) if field.name in told})
