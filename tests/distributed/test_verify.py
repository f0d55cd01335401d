"""`python -m train verify`: all ways are the same to 1e-10, and wrong strategies are caught, each by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.jobs import joined
from tests.ranks import run_ranks, train_ranks
from train.checks.verify import cases, reference, training
from train.checks.verify.certificate import Row
from train.checks.verify.command import _rows
from train.checks.verify.diagnosis import explain
from train.data import open_data
from train.errors import MusterError
from train.health import Health
from train.resume import resume
from train.state import Job

WAYS = ("", "4 micro-batches", "partial windows", "clipped", "resumed", "bf16")
ALL = ["baseline", "baseline, 4 micro-batches", "dp, unequal chunks",
       *(f"{name}, {way}" if way else name for name in ("ddp", "manual") for way in WAYS)]  # fmt: skip
BROKEN = {
    "NoAllReduce": r"^from step 1 on: each rank keeps the gradient of its own samples",
    "SumNotMean": r"^from step 1 on: the gradient is 3 times the right one: the sum of the ranks' means",
    "OneLeftOut": r"^from step 1 on only 2\.bias has a wrong gradient: it is left out of the all-reduce",
    "LocalClip": r"added up with the factors .* each was scaled by itself before, as when it is clipped",
    "NominalWindow": r"^from step 7 on: this window is partial, 1 samples where 24 are usual, .* is 0\.125 times",
    "NoBroadcast": r"^rank 2 begins with other weights than rank 0 \(\|Δ\| up to 0\.2\): `wrap`",
    "DividedTwice": r"^from step 1 on: the gradient is 1/3 of the right one",
}  # fmt: skip


def _certificate(own: str | None) -> list[Row]:
    return list(_rows(joined(), Health(), own))


def _certificates(names: list[str]) -> dict[str, list[Row]]:
    return {name: _certificate(f"tests.broken_strategies:{name}") for name in names}


def _without_resume() -> str:
    """Where the second half does not go on from the checkpoint, that is said."""
    with patch.object(training, "resume", lambda job, options, folder: None):
        try:
            _certificate("tests.broken_strategies:Right")
        except MusterError as error:
            return str(error)
    return ""


def _without_moments() -> list[Row]:
    """Goes on from the right weights with an optimizer that has forgotten everything."""
    whole = resume

    def forgetful(job: Job, *others: Any) -> None:
        whole(job, *others)
        job.optimizer.state.clear()

    with patch.object(training, "resume", forgetful):
        return _certificate("tests.broken_strategies:Right")


def _by_hand(clip_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradients, weights) of one process from a loop that shares nothing with the reference: means, torch's own
    clipping, and torch's own schedule."""
    config = cases.job(2)
    data = open_data(config.data, config.train.seed)
    order = [i for epoch in range(4) for i in torch.randperm(
        len(data.train), generator=torch.Generator().manual_seed(1337 * 1_000_003 + epoch)
    )[:96].split(16)]  # fmt: skip
    torch.manual_seed(1337)
    net = cases.model().double()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    clock = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(clock, 17, eta_min=0.001)
    gradients, weights = [], []
    for step in range(20):
        inputs, labels = data.train.gather(order[step])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs.double()), labels).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1) / 3 if step < 3 else cosine.get_last_lr()[0]
        gradients.append(torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]))
        optimizer.step()
        weights.append(torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()]))
        if step >= 3:
            clock.step()
            cosine.step()
    return torch.stack(gradients), torch.stack(weights)


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_the_reference_equals_a_loop_written_out_by_hand(clip_norm: float) -> None:
    config = cases._with(cases.job(2), "baseline", clip_norm=clip_norm)
    found = reference.train(config, open_data(config.data, config.train.seed), 2)
    gradients, weights = _by_hand(clip_norm)
    torch.testing.assert_close(found.gradients, gradients, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.weights, weights, rtol=0, atol=1e-12)
    if clip_norm:
        assert int((found.gradients.norm(dim=1) > 0.0999).sum()) > 10  # it is clipped indeed
    else:
        torch.testing.assert_close(torch.stack([part.sum(0) for part in found.parts]), gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_all_ways_are_the_same_in_float64_and_within_the_limit_in_bf16(ranks: int) -> None:
    by_rank = run_ranks(ranks, _certificate, None)
    assert all(rows == by_rank[0] for rows in by_rank)  # all ranks come to one conclusion
    assert [row.name for row in by_rank[0]] == ALL
    for row in by_rank[0]:
        assert row.is_same, row
        assert row.words == ""
        assert max(row.gradients, row.weights) <= (2**-6 if row.is_relative else 1e-10)
        assert row.between_ranks <= (1.0 if row.is_relative else 1e-10)
        assert row.gradients > 0  # two ways of adding up: something has been compared
    assert all(row.is_relative and row.gradients > 1e-4 for row in by_rank[0] if "bf16" in row.name)


@pytest.mark.slow
def test_each_broken_strategy_is_caught_and_named() -> None:
    found = run_ranks(3, _certificates, list(BROKEN))[0]
    for name, words in BROKEN.items():
        rows = {row.name.removeprefix(name).removeprefix(", "): row for row in found[name]}
        assert list(rows) == list(WAYS)
        wrong = [way for way, row in rows.items() if not row.is_same]
        in_partial_windows_alone = name == "NominalWindow"
        assert wrong == [way for way in WAYS if not in_partial_windows_alone or way not in ("", "4 micro-batches")]
        told = rows["resumed" if in_partial_windows_alone else ""].words
        assert re.search(words, told), f"{name}: {told}"


@pytest.mark.slow
def test_a_resumed_run_really_saves_and_loads() -> None:
    told = run_ranks(2, _without_resume)
    assert told == ["went on from step 0 where 11 were saved"] * 2
    rows = {row.name: row for row in run_ranks(2, _without_moments)[0]}
    assert [name for name, row in rows.items() if not row.is_same] == ["Right, resumed"]
    assert rows["Right, resumed"].weights > 1e-4
    assert rows["Right, resumed"].words.startswith("from step 13 on")  # 12 is the first after it: its update is wrong


@pytest.mark.slow
def test_the_command_gives_a_certificate_and_exit_codes(tmp_path: Path) -> None:
    told = tmp_path / "certificate.json"
    first, second = train_ranks(2, "verify", "--json", str(told))
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stdout + second.stdout
    assert first.stdout.count("the same") == len(ALL) + 1
    assert all(len(line) <= 100 for line in first.stdout.splitlines())
    found = json.loads(told.read_text())
    assert (found["same"], found["ranks"], found["strategy"]) == (True, 2, None)
    assert found["limits"] == {"float64_max_abs": 1e-10, "bf16_relative": 0.015625}
    assert [row["way"] for row in found["rows"]] == ALL

    first, second = train_ranks(2, "verify", "--strategy", "tests.broken_strategies:NoAllReduce", "--json", str(told))
    assert (first.returncode, second.returncode) == (5, 5), first.stdout + second.stdout
    assert "6 of 6 ways are not the same: NoAllReduce: from step 1 on: each rank keeps" in first.stdout
    found = json.loads(told.read_text())
    assert [row["same"] for row in found["rows"]] == [False] * 6
    assert found["rows"][0]["why"].startswith("from step 1 on: each rank keeps")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.broken_strategies:Wright", "has no function 'Wright'; did you mean Right?"),
        ("tests.jobs:weights", "is no subclass of train.strategies.Strategy"),
        ("no_such_module:Mine", "no module 'no_such_module' here"),
    ],
)
def test_a_strategy_that_is_none_is_refused(name: str, words: str) -> None:
    (done,) = train_ranks(1, "verify", "--strategy", name)
    assert done.returncode == 2, done.stdout
    assert words in done.stdout


def test_a_gradient_that_is_no_sum_of_the_ranks_own_is_called_that() -> None:
    config = cases._with(cases.job(2), "baseline")
    right = reference.train(config, open_data(config.data, config.train.seed), 2)
    initial = right.initial.repeat(2, 1)
    noise = torch.randn(right.gradients.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = explain(right, initial, (right.gradients + noise).repeat(2, 1, 1), 1e-10, 16)
    assert told == "from step 1 on: the gradients are no sum of the ranks' own ones, whatever the factors"
    once = right.gradients.clone()
    once[4] *= 0.25
    told = explain(right, initial, once.repeat(2, 1, 1), 1e-10, 16)
    assert told == "first in step 5: the gradient is 0.25 times the right one"
    assert explain(right, initial, right.gradients.repeat(2, 1, 1), 1e-10, 16).startswith("the gradients are right, so")
