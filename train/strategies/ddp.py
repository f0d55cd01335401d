"""One process a device: torch's DistributedDataParallel sends gradients while backward still runs."""

# No `from __future__ import annotations` here: torch reads the hook's annotations as they stand.

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.variable import Variable
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from train.config import StrategyConfig
from train.runtime import Runtime
from train.seam import Phase
from train.strategies.base import Strategy


class DistributedDataParallel(Strategy):
    """What to use on more than one device."""

    needs_group: ClassVar[bool] = True

    def __init__(self, config: StrategyConfig, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self.loss_scale = float(runtime.world_size)  # DDP averages over ranks; the loss's own count does that here

    def wrap(self, objective: nn.Module) -> None:
        """torch's wrapper makes the weights equal, and sends buckets of gradients as backward fills them."""
        device = self.runtime.device
        self.ddp = TorchDDP(
            objective,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.config.bucket_mb,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            forward_sync_buffers=False,  # the loop does, once a step and for every strategy alike
            static_graph=self.config.static_graph,
            find_unused_parameters=self.config.find_unused_parameters,
        )
        self.module = self.ddp
        self._add_hook()

    def settle(self, batch: tuple[torch.Tensor, ...]) -> None:
        """One backward of nothing: after its first one torch lays buckets out anew, as gradients came.

        Where a gradient lies decides in which order three ranks or more are added up; of two, the order is no matter.
        """
        if self.runtime.world_size < 3 or self.config.comm_hook == "powersgd":
            return
        before = [buffer.clone() for buffer in self.buffers]
        loss_sum, _ = self.forward(batch)
        (loss_sum * 0.0).backward()
        for parameter in self.module.parameters():
            parameter.grad = None
        for buffer, value in zip(self.buffers, before, strict=True):
            buffer.copy_(value)

    def hold_gradients(self) -> AbstractContextManager[object]:
        """No all-reduce until the last micro-batch."""
        return self.ddp.no_sync()

    def before_waiting(self, mark: Callable[[], None]) -> None:
        """Backward runs what was queued for its end in order, and torch queues its waiting behind the last gradient.

        So what is queued by any gradient comes before. A model that does not use its last parameter has no such mark.
        """
        ddp, engine = self.ddp, Variable._execution_engine

        def queue(_: torch.Tensor) -> None:
            if ddp.require_backward_grad_sync:
                engine.queue_callback(mark)

        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        trained[-1].register_post_accumulate_grad_hook(queue)

    def _add_hook(self) -> None:
        group = self.runtime.group(Phase.STEP)
        if self.config.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=group,
                matrix_approximation_rank=self.config.powersgd_rank,
                start_powerSGD_iter=10,  # the first steps' gradients change too fast to be approximated (its docs)
            )
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.config.comm_hook != "none":
            wire = torch.float16 if self.config.comm_hook == "fp16" else torch.bfloat16
            self.ddp.register_comm_hook((group, wire), _rounded_all_reduce)


def _rounded_all_reduce(
    state: tuple[dist.ProcessGroup, torch.dtype],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 16 bits: half the bytes. torch's own hook for bfloat16 refuses all backends but NCCL."""
    group, wire = state
    full = bucket.buffer()
    rounded = (full / group.size()).to(wire)  # averaged before it is rounded: float16 ends at 65504
    work = dist.all_reduce(rounded, group=group, async_op=True)
    return work.get_future().then(lambda done: full.copy_(done.value()[0]))  # type: ignore[no-any-return]
