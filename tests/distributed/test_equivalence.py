"""All ways to train are one: after 20 steps in float64 with clipping and AdamW their weights agree to 1e-10."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch

from tests.jobs import Flags, config_of, make_job, train_all, weights
from tests.ranks import run_ranks
from train import loop
from train.strategies import DataParallel
from train.tally import Tally

# 97 samples to train on, 16 a step: each epoch ends with a batch of one, of which two or three ranks get none at all.
TABLE = (
    "model.name=mlp", "data.name=classification", "data.size=102", "precision.name=fp64", "batch.global_size=16",
    "optim.clip_norm=0.5", "optim.lr=0.01", "optim.warmup_steps=3", "optim.min_lr_ratio=0.1", "train.steps=20",
    "data.val_fraction=0.05",
)  # fmt: skip
# 1005 bytes are 126 windows of 8, the last with 4 targets and 4 masked ones: counts differ between ranks and batches.
TEXT = (
    "model.layers=1", "model.width=16", "data.block_size=8", "data.val_fraction=0.1", "precision.name=fp64",
    "batch.global_size=20", "optim.clip_norm=0.5", "optim.warmup_steps=3", "train.steps=20",
)  # fmt: skip
WORLDS: dict[int, dict[str, Flags]] = {
    1: {
        "baseline": ["strategy.name=baseline"],
        "accumulation 4": ["strategy.name=baseline", "batch.accumulation=4"],
        "dp": ["strategy.name=dp"],
        "ddp x1": ["strategy.name=ddp"],
    },
    2: {
        "ddp": ["strategy.name=ddp"],
        "ddp, static graph": ["strategy.name=ddp", "strategy.static_graph=true"],
        "ddp, no views, small buckets": [
            "strategy.name=ddp", "strategy.gradient_as_bucket_view=false", "strategy.bucket_mb=0.001",
        ],
        "ddp, accumulation 4": ["strategy.name=ddp", "batch.accumulation=4"],
        "ddp, micro-batches of 3": ["strategy.name=ddp", "batch.micro_size=3"],
        "ddp, loader with workers": ["strategy.name=ddp", "data.loader=workers", "data.workers=1"],
        "manual": ["strategy.name=manual"],
        "manual, small buckets, accumulation 2": [
            "strategy.name=manual", "strategy.bucket_mb=0.001", "batch.accumulation=2",
        ],
    },
    3: {"ddp, unequal shares": ["strategy.name=ddp"], "manual, unequal shares": ["strategy.name=manual"]},
}  # fmt: skip
TEXT_WORLDS: dict[int, dict[str, Flags]] = {
    1: {"text": ["strategy.name=baseline"], "text, accumulation 5": ["strategy.name=baseline", "batch.accumulation=5"]},
    2: {
        "text, ddp": ["strategy.name=ddp"],
        "text, ddp, micro-batches of 4, recomputed": [
            "strategy.name=ddp", "batch.micro_size=4", "model.checkpoint_activations=true",
        ],
        "text, manual": ["strategy.name=manual"],
    },
    3: {"text, ddp, unequal shares": ["strategy.name=ddp"]},
}  # fmt: skip


def _by_hand() -> torch.Tensor:
    """The baseline's weights from a loop written out here: same samples, plain torch, means and no sums."""
    config = config_of(*TABLE)
    job = make_job(config)
    model = job.objective.model
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), foreach=False, fused=False)
    clock = torch.optim.SGD([torch.zeros(1)], lr=0.01)  # moves nothing: it only carries torch's own schedule
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(clock, 17, eta_min=0.001)
    for step in range(20):
        inputs, labels = job.data.train.gather(job.order.batch(step))
        loss = torch.nn.functional.cross_entropy(model(inputs.double()), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1) / 3 if step < 3 else cosine.get_last_lr()[0]
        optimizer.step()
        if step >= 3:
            clock.step()
            cosine.step()
    return weights(job)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_bytes(bytes(range(32, 99)) * 15 + bytes(111))  # 1116 bytes, of which 1004 to train on
    text = [*TEXT, f"data.paths=[{folder / 'text.txt'}]", f"data.cache_dir={folder}"]
    found: dict[str, torch.Tensor] = {}
    for world_size, cases in WORLDS.items():
        flags = {name: [*TABLE, *case] for name, case in cases.items()}
        flags |= {name: [*text, *case] for name, case in TEXT_WORLDS[world_size].items()}
        for rank, theirs in enumerate(run_ranks(world_size, train_all, flags)):
            found |= {f"{name} on rank {rank} of {world_size}": vector for name, vector in theirs.items()}
    return found


def test_the_baseline_equals_a_loop_written_out_by_hand(results: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(results["baseline on rank 0 of 1"], _by_hand(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("work", "ways"), [("table", 4 + 8 * 2 + 2 * 3), ("text", 2 + 3 * 2 + 3)])
def test_every_way_equals_the_baseline(work: str, ways: int, results: dict[str, torch.Tensor]) -> None:
    baseline = results["text on rank 0 of 1" if work == "text" else "baseline on rank 0 of 1"]
    mine = {name: theirs for name, theirs in results.items() if name.startswith("text") == (work == "text")}
    assert len(mine) == ways
    off = {name: float((theirs - baseline).abs().max()) for name, theirs in mine.items()}
    assert {name: distance for name, distance in off.items() if not distance < 1e-10} == {}


def test_ranks_hold_the_same_bits(results: dict[str, torch.Tensor]) -> None:
    for name, theirs in results.items():
        assert torch.equal(theirs, results[name.replace(name[name.index(" on rank ") :], f" on rank 0 of {name[-1]}")])


@pytest.mark.parametrize("sizes", [[16], [9, 7], [6, 6, 4], [15, 1]])
def test_uneven_chunks_of_data_parallel_equal_the_baseline(sizes: list[int], results: dict[str, torch.Tensor]) -> None:
    def split(batch: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        cuts = [n for n in torch.tensor(sizes).cumsum(0).tolist() if n < len(batch[0])]
        return list(zip(*(tensor.tensor_split(cuts) for tensor in batch), strict=True))

    job = make_job(config_of(*TABLE, "strategy.name=dp"))
    job.strategy = DataParallel(job.config.strategy, job.runtime, split=split)
    job.strategy.wrap(job.objective)
    loop.fit(job)
    torch.testing.assert_close(weights(job), results["baseline on rank 0 of 1"], rtol=0, atol=1e-10)


# The deliberate bugs: each must be seen by the comparison above, or it compares nothing.


def _broken(bug: str) -> AbstractContextManager[object]:
    if bug == "nominal window":
        return patch.object(Tally, "count", lambda self: torch.tensor(16.0, dtype=torch.float64))
    return patch("train.strategies.ddp.float", lambda _: 1.0, create=True)  # takes DDP's average for the mean


def _train_broken(bugs: list[str], flags: Flags) -> dict[str, torch.Tensor]:
    results = {}
    for bug in bugs:
        with _broken(bug):
            job = make_job(config_of(*flags, world_size=2))
            loop.fit(job)
            results[bug] = weights(job)
    return results


def test_deliberate_bugs_are_seen(results: dict[str, torch.Tensor]) -> None:
    bugs = ["nominal window", "mean over ranks"]
    broken = run_ranks(2, _train_broken, bugs, [*TABLE, "strategy.name=ddp", "batch.accumulation=4"])[0]
    for bug in bugs:
        assert (broken[bug] - results["baseline on rank 0 of 1"]).abs().max() > 1e-6, bug
