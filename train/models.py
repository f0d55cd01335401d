"""What can be trained: a GPT, the tutorial's two models, or the user's own; and the loss that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from train.config import ModelConfig
from train.data import Spec
from train.errors import UsageError
from train.own import call, load_function
from train.rules import PRESETS


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on the normalised sum of what came before (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` is [batch, time, width]; `cos` and `sin` are [time, width / heads / 2]."""
        batch, time, width = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Normalised, queries and keys cannot grow until attention saturates: higher learning rates stay stable.
        query, key = (rotate(F.layer_norm(z, z.shape[-1:]), cos, sin) for z in (query, key))
        chance = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=chance)
        x = x + F.dropout(self.mix(seen.transpose(1, 2).reshape(batch, time, width)), self.dropout, self.training)
        hidden = F.relu(self.up(self.norm_2(x))).square()
        return x + F.dropout(self.down(hidden), self.dropout, self.training)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): turn the pair (i, i + half) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class GPT(nn.Module):
    """A decoder that predicts the next token; input and output embeddings are tied."""

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.checkpoint_activations = checkpoint_activations
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(block_size), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight")):
                nn.init.zeros_(parameter)  # each block starts as the identity
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=width**-0.5)  # keeps the variance of what goes in

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, time, vocab_size] for tokens [batch, time]; time is at most block_size."""
        time = tokens.shape[1]
        x = self.embedding(tokens)
        cos, sin = self.cos[:time].to(x.dtype), self.sin[:time].to(x.dtype)  # type: ignore[index]
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                # The reentrant kind marks parameters ready twice under DDP (pytorch#24005).
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, length: int, temperature: float = 0.8) -> torch.Tensor:
        """`prompt` [time] and `length` sampled tokens after it, from the global generator."""
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[None, -self.block_size :])[0, -1].float() / temperature
            tokens = torch.cat((tokens, torch.multinomial(logits.softmax(0), 1)))
        return tokens


class MLP(nn.Module):
    """The tutorial's SimpleModel: two linear layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [batch, outputs] for features [batch, inputs]."""
        hidden: torch.Tensor = F.relu(self.fc1(x))
        return self.fc2(hidden)  # type: ignore[no-any-return]


def build_model(config: ModelConfig, spec: Spec, block_size: int) -> nn.Module:
    """The model that the config names, for this data, on the CPU. Raises UsageError."""
    if config.name == "gpt":
        if spec.kind not in ("tokens", "own"):
            raise UsageError(f"model.name: gpt reads tokens, but the data holds {spec.kind}")
        layers, heads, width = PRESETS[config.preset]
        layers, heads, width = config.layers or layers, config.heads or heads, config.width or width
        if width % (2 * heads):
            raise UsageError(f"model.heads: width {width} / heads {heads} must be a whole, even number")
        return GPT(spec.outputs, block_size, layers, heads, width, config.dropout, config.checkpoint_activations)
    if config.name in ("mlp", "linear"):
        if spec.kind == "own":
            raise UsageError(f"model.name: {config.name} cannot know the shape of your own data; bring a model too")
        if config.name == "linear":
            return nn.Linear(spec.inputs, spec.outputs)
        return MLP(spec.inputs, config.width or 20, spec.outputs)
    model = call("model", config.name, config.args)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model.name: {config.name} must return a torch.nn.Module, not a {type(model).__name__}")
    return model


Loss = Callable[[Any, torch.Tensor], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def build_loss(config: ModelConfig) -> Loss:
    """The user's own loss, or the one that suits the targets."""
    return default_loss if config.loss is None else load_function("model.loss", config.loss)


def default_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of losses, number of items): cross-entropy for classes, squared error for numbers.

    A target of -100 is no item. A row of numbers counts as one item, with the mean over its numbers.
    """
    if target.is_floating_point():
        if output.shape != target.shape:
            raise UsageError(
                f"model.loss: squared error needs outputs and targets of one shape, but has {tuple(output.shape)} and "
                f"{tuple(target.shape)}: reshape one of them, or bring a loss of your own"
            )
        losses = (output - target).square().reshape(len(target), -1).mean(1)
        return losses.sum(), torch.tensor(len(target), device=losses.device)
    flat = target.reshape(-1)
    logits = output.reshape(-1, output.shape[-1])
    logits = logits.float() if logits.element_size() < 4 else logits
    losses = F.cross_entropy(logits, flat, ignore_index=-100, reduction="sum")
    return losses, (flat != -100).sum()


class Objective(nn.Module):
    """A model with its loss: what a strategy replicates. Sums and counts, never means of means.

    With the loss inside, DataParallel's replicas return two numbers each instead of all their outputs, and
    `torch.compile` sees the whole computation.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """`autocast` is entered in here and not outside: DataParallel's threads would not see it there."""
        super().__init__()
        self.model = model
        self.loss = loss
        self.autocast = autocast

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of losses [1], number of items [1]) for inputs and target. Raises UsageError on a mean."""
        loss_sum, count, _ = self.measure(*batch)
        return loss_sum.reshape(1), count.reshape(1)

    def measure(self, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sum of losses, number of items, the model's output): scalars, and what `forward` computes inside."""
        *inputs, target = batch
        with self.autocast():
            output = self.model(*inputs)
            losses = self.loss(output, target)
        if isinstance(losses, tuple):
            loss_sum, count = losses
            return loss_sum, torch.as_tensor(count, device=loss_sum.device), output
        if losses.dim() == 0:
            raise UsageError(
                "model.loss: your loss returned one number; return one loss an item (reduction='none'), or the pair "
                "(sum, count): only then is the gradient the exact mean over unequal micro-batches and ranks"
            )
        return losses.sum(), torch.tensor(losses.numel(), device=losses.device), output


def count_correct(output: Any, target: torch.Tensor) -> torch.Tensor:
    """(targets that the largest output names, targets): both 0 where targets are not classes. int64 [2]."""
    is_one_a_target = isinstance(output, torch.Tensor) and output.shape[:-1] == target.shape
    if target.is_floating_point() or not is_one_a_target:
        return torch.zeros(2, dtype=torch.int64, device=target.device)
    return torch.stack(((output.argmax(-1) == target).sum(), (target != -100).sum()))
