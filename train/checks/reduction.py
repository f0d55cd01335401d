"""One rank of preflight's all-reduce: is the sum right, and how fast does it come? Started by train/launch/preflight.

Told on standard input where to meet, as a line of JSON, once torch is loaded; tells on standard output what came of it.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

JOIN_S = 90.0
NUMBERS, LARGEST = 1 << 20, 1 << 23  # 4 MiB of float32; from there on, their sums would be rounded
TIMED_S, LEAST_TIMES = 1.0, 2


def reduced(told: dict[str, Any]) -> dict[str, Any]:
    """Meet the others and add up.

    Args:
        told: `address`, `port`, `rank`, `world_size`, `device` (cpu or cuda), `local_rank`.
    """
    is_cuda = told["device"] == "cuda"
    device = torch.device("cuda", told["local_rank"]) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    rank, size = int(told["rank"]), int(told["world_size"])
    patience = timedelta(seconds=JOIN_S)
    store = TCPStore(told["address"], int(told["port"]), size, is_master=rank == 0, timeout=patience)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=size, timeout=patience,
        device_id=device if is_cuda else None,
    )  # fmt: skip
    wrong = _wrong(rank, size, device)
    bytes_per_s = _rate(size, device)
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": wrong, "mb_per_s": bytes_per_s / 1e6, **_versions(is_cuda=is_cuda)}


def _wrong(rank: int, size: int, device: torch.device) -> int:
    """How many sums are not what they are by hand: rank r gives (r + 1) · k, so n(n + 1)/2 · k comes out."""
    most = max(1, LARGEST // (size * (size + 1) // 2))
    numbers = (torch.arange(NUMBERS, device=device) % most).to(torch.float32)
    given = numbers * (rank + 1)
    dist.all_reduce(given)
    return int((given != numbers * (size * (size + 1) // 2)).sum().item())


def _rate(size: int, device: torch.device) -> float:
    """Bus bandwidth, in bytes a second, as nccl-tests reckon it: bytes · 2(n - 1)/n over the time of one all-reduce."""
    numbers = torch.ones(NUMBERS, device=device)
    goes_on = torch.ones(1, device=device)
    began_s, times = time.perf_counter(), 0
    while goes_on.item():
        dist.all_reduce(numbers)
        times += 1
        # All ranks stop at the same one: rank 0 says when.
        goes_on.fill_(float(times < LEAST_TIMES or time.perf_counter() - began_s < TIMED_S))
        dist.broadcast(goes_on, 0)
    each_s = (time.perf_counter() - began_s) / times
    return NUMBERS * 4 * 2 * (size - 1) / size / each_s


def _versions(*, is_cuda: bool) -> dict[str, str]:
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if is_cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main() -> int:
    """The rank."""
    try:
        told = reduced(json.loads(sys.stdin.readline()))
    except Exception as error:
        told = {"problem": (str(error) or type(error).__name__).splitlines()[0]}
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
