"""How one model becomes many replicas: one file each, so that two diff like a lesson."""

from __future__ import annotations

from train.config import StrategyConfig
from train.runtime import Runtime
from train.strategies.base import Strategy
from train.strategies.baseline import Baseline
from train.strategies.data_parallel import DataParallel
from train.strategies.ddp import DistributedDataParallel
from train.strategies.manual import Manual

STRATEGIES: dict[str, type[Strategy]] = {
    "baseline": Baseline,
    "dp": DataParallel,
    "ddp": DistributedDataParallel,
    "manual": Manual,
}


def make_strategy(config: StrategyConfig, runtime: Runtime) -> Strategy:
    """The strategy that the config names."""
    return STRATEGIES[config.name](config, runtime)


__all__ = ["STRATEGIES", "Baseline", "DataParallel", "DistributedDataParallel", "Manual", "Strategy", "make_strategy"]
