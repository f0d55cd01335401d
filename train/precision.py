"""In which numbers the model computes: plain, by autocast, or by autocast with a gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from train.config import PrecisionConfig

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """scale → backward → unscale → clip → step → update, with the scaler where fp16 needs one."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self._device = device
        self._dtype = _AUTOCAST.get(config.name)
        self._double = config.name == "fp64"
        self.scaler = (
            torch.amp.GradScaler(device.type, init_scale=config.initial_scale, growth_interval=config.growth_interval)
            if config.name == "fp16"
            else None
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model in the type its parameters are kept in: float32, or float64 for fp64."""
        return model.double() if self._double else model

    def cast(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The batch in the parameters' type."""
        if not self._double:
            return batch
        return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)

    def autocast(self) -> AbstractContextManager[object]:
        """Around a forward pass and its loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, scaled up so that small gradients do not vanish in fp16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients in their own size again, once a window, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights; False where the scaler found infinities and skipped the update."""
        if self.scaler is None:
            optimizer.step()
            return True
        stepped = False

        def note(*_: Any) -> None:
            nonlocal stepped
            stepped = True

        handle = optimizer.register_step_post_hook(note)
        self.scaler.step(optimizer)
        handle.remove()
        self.scaler.update()
        return stepped

    def state(self) -> dict[str, Any]:
        """The scaler's state; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Take up a state again; one of another precision leaves the scaler as it is."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
