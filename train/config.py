"""One typed, frozen config: what each field means, and which values can work together.

Free of torch: a bad config is refused before anything slow starts. `train/options.py` fills it from
recipes, YAML files and the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from train.seam import Phase


@dataclass(frozen=True)
class StrategyConfig:
    """How one model becomes many replicas."""

    name: Literal["baseline", "dp", "ddp", "manual"] = "baseline"
    """baseline: one process. dp: one process, several GPUs. ddp: one process a device. manual: ddp by hand"""
    bucket_mb: float = 25.0
    """Gradients travel in buckets of this size (ddp, manual)"""
    gradient_as_bucket_view: bool = True
    """Gradients live inside the buckets: one copy less (ddp)"""
    static_graph: bool = False
    """The same parameters are used in every step (ddp)"""
    find_unused_parameters: bool = False
    """Look for parameters that a step did not use (ddp); costs a walk over the graph"""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compress gradients on the wire (ddp)"""
    powersgd_rank: int = 1
    """Rank of PowerSGD's low-rank gradient"""


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    name: str = "gpt"
    """gpt, mlp, linear, or your own as `module:function`"""
    preset: Literal["tiny", "small", "10M", "124M"] = "tiny"
    """Shape of a gpt; layers, heads and width override it"""
    layers: int | None = None
    """Blocks of a gpt"""
    heads: int | None = None
    """Attention heads of a gpt; must divide width"""
    width: int | None = None
    """Embedding size of a gpt, hidden size of an mlp"""
    dropout: float = 0.0
    """Dropout probability of a gpt"""
    loss: str | None = None
    """Your own loss as `module:function`; default: cross-entropy for classes, squared error for numbers"""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own model function"""
    compile: bool = False
    """Run the model through torch.compile"""
    checkpoint_activations: bool = False
    """Recompute each block's activations in the backward pass: less memory, a third more time"""


@dataclass(frozen=True)
class DataConfig:
    """What it is trained on."""

    name: str = "text"
    """text, tokens, digits, regression, classification, or your own as `module:function`"""
    paths: list[str] | str = field(default_factory=list)
    """text: a file, glob or folder, or a list of them (default: the installed torch's sources);
    tokens: [train.bin, val.bin]"""
    block_size: int = 128
    """Length of a training window, in tokens (text, tokens)"""
    vocab_size: int = 50304
    """Number of different tokens (tokens, and a gpt on your own data); the default is GPT-2's 50257, padded"""
    val_fraction: float = 0.02
    """Share held out for validation: by file where there are several, else the tail"""
    size: int = 1000
    """Number of samples (regression, classification)"""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own data function"""
    loader: Literal["gather", "workers"] = "gather"
    """gather: a batch by one indexing. workers: a DataLoader, for samples that must be decoded"""
    workers: int = 2
    """Processes of the DataLoader (loader: workers); 0 decodes in the training process"""
    drop_last: bool = False
    """Leave out an epoch's last, smaller batch"""
    cache_dir: str | None = None
    """Where prepared data is kept, once a host (default: ~/.cache/muster)"""

    @property
    def path_list(self) -> list[str]:
        """`paths` as a list, also where one alone was given."""
        return [self.paths] if isinstance(self.paths, str) else self.paths


@dataclass(frozen=True)
class BatchConfig:
    """How a step's items are shared out."""

    global_size: int = 8
    """Samples a step, over all ranks and micro-batches"""
    micro_size: int | None = None
    """Most samples a rank holds at a time; accumulation follows from it"""
    accumulation: int | None = None
    """Micro-batches a step on each rank; must divide global_size / world size"""


@dataclass(frozen=True)
class OptimConfig:
    """How weights move."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer"""
    lr: float = 4e-3
    """Peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates"""
    momentum: float = 0.0
    """SGD's momentum"""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (biases, gains) are not decayed"""
    clip_norm: float = 1.0
    """Largest gradient norm, after unscaling; 0 does not clip"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Course of the learning rate after the warm-up"""
    warmup_steps: int = 80
    """Updates over which the learning rate rises linearly from 0"""
    min_lr_ratio: float = 0.05
    """Where the cosine ends, as a share of lr"""


@dataclass(frozen=True)
class PrecisionConfig:
    """In which numbers."""

    name: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp32; bf16 or fp16 by autocast, fp16 with a gradient scaler; fp64 for proofs"""
    initial_scale: float = 65536.0
    """First loss scale (fp16)"""
    growth_interval: int = 2000
    """Good steps before the loss scale doubles (fp16)"""


@dataclass(frozen=True)
class TrainConfig:
    """How long, and what happens along the way."""

    steps: int = 1500
    """Optimizer steps"""
    epochs: int | None = None
    """Passes over the data; where given, it decides instead of steps"""
    seed: int = 1337
    """Fixes the weights at the start, the order of samples and all randomness"""
    threads: int = 1
    """CPU threads a rank computes with; part of what makes runs bit-identical"""
    log_every: int = 10
    """Steps between rows of metrics.jsonl"""
    eval_every: int = 0
    """Steps between evaluations; 0: at the end only"""
    save_every: int = 0
    """Steps between checkpoints; 0: at the end only"""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay"""
    keep_every: int = 0
    """Checkpoints of multiples of so many steps stay too; 0: none"""
    check_replicas_every: int = 100
    """Steps between comparisons of the ranks' parameters; 0: never"""
    tensorboard: bool = True
    """Write TensorBoard files"""
    log_samples: bool = False
    """Write down which samples each rank sees at each step: samples/rank<r>.jsonl"""
    sample_tokens: int = 400
    """Length of the text that a gpt writes at the end; 0: none"""


@dataclass(frozen=True)
class RuntimeConfig:
    """Where it runs, and how long it waits."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one. cuda: refuse to run without"""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda, gloo on cpu"""
    interface: str | None = None
    """Network interface for gloo and nccl (default: the one that routes to the master)"""
    join_timeout_s: float = 120.0
    """All ranks must have come by then"""
    start_timeout_s: float = 1800.0
    """Longest time from a rank's start to its first step; a node agent holds it to that"""
    first_step_timeout_s: float = 900.0
    """Longest wait within the first step after each start: it may have to compile and to fill caches"""
    step_timeout_s: float = 300.0
    """Longest wait for the other ranks within a step"""
    eval_timeout_s: float = 1800.0
    """Longest wait for the other ranks' evaluation"""
    save_timeout_s: float = 1800.0
    """Longest wait for a checkpoint"""

    def budget_s(self, phase: Phase) -> float:
        """How long a rank may be in that phase without getting on."""
        return {
            Phase.STARTING: self.start_timeout_s,
            Phase.FIRST_STEP: max(self.first_step_timeout_s, self.step_timeout_s),
            Phase.STEP: self.step_timeout_s,
            Phase.EVALUATION: self.eval_timeout_s,
            Phase.SAVING: self.save_timeout_s,
            Phase.ENDING: self.save_timeout_s,
        }[phase]


@dataclass(frozen=True)
class Config:
    """A whole training job."""

    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def as_dict(self) -> dict[str, Any]:
        """The config as plain dictionaries and lists, as written to `config.yaml`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Equal for equal configs, on every host: 12 hexadecimal digits."""
        canonical = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def field_names(kind: type = Config, prefix: str = "") -> list[str]:
    """Every leaf field as a dotted name, in the order of the classes above."""
    names: list[str] = []
    for entry in dataclasses.fields(kind):
        factory = entry.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            names += field_names(factory, f"{prefix}{entry.name}.")
        else:
            names.append(f"{prefix}{entry.name}")
    return names
