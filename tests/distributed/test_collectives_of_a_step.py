"""What a step sends: with eight micro-batches no more gradient all-reduces than with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.jobs import config_of, make_job
from tests.ranks import run_ranks
from train import loop
from train.strategies import DistributedDataParallel

STEPS = 3
TABLE = (
    "model.name=mlp", "data.name=classification", "batch.global_size=32", f"train.steps={STEPS}",
    "strategy.bucket_mb=0.0001", "train.check_replicas_every=0", "train.log_every=1",
)  # fmt: skip


def _count(strategies: list[str]) -> dict[str, list[int]]:
    """(gradient all-reduces, all-reduces of all kinds) of the same steps, by strategy and accumulation."""
    counts: dict[str, list[int]] = {}
    real: Callable[..., Any] = dist.all_reduce
    for strategy in strategies:
        for accumulation in (1, 8):
            config = config_of(*TABLE, f"strategy.name={strategy}", f"batch.accumulation={accumulation}", world_size=2)
            job = make_job(config)
            buckets: list[int] = []
            calls: list[torch.Size] = []

            if isinstance(job.strategy, DistributedDataParallel):

                def hook(state, bucket, seen=buckets):  # type: ignore[no-untyped-def]  # DDP reads annotations
                    seen.append(bucket.buffer().numel())
                    work = real(bucket.buffer().div_(2), async_op=True)
                    return work.get_future().then(lambda future: future.value()[0])

                job.strategy.ddp.register_comm_hook(None, hook)

            def counted(tensor: torch.Tensor, *args: Any, seen: list[torch.Size] = calls, **named: Any) -> Any:
                seen.append(tensor.shape)
                return real(tensor, *args, **named)

            dist.all_reduce = counted
            try:
                loop.fit(job)
            finally:
                dist.all_reduce = real
            counts[f"{strategy} {accumulation}"] = [len(buckets), len(calls)]
    return counts


def test_a_window_of_eight_sends_what_a_window_of_one_sends() -> None:
    """Four parameters, each in a bucket of its own: four all-reduces a step, and one for the step's sums."""
    for counts in run_ranks(2, _count, ["ddp", "manual"]):
        assert counts["ddp 1"][0] > STEPS  # more than one bucket a step, so that counting them means something
        assert counts["ddp 8"] == counts["ddp 1"]
        last_evaluation = 1
        assert counts["ddp 8"][1] == STEPS + last_evaluation
        assert counts["manual 8"] == counts["manual 1"] == [0, STEPS * (4 + 1) + last_evaluation]
