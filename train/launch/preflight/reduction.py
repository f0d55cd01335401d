"""All hosts add up over the network with torch: by processes of their own, so that none of this is imported here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from train.launch.topology import Plan
from train.network import interface_towards

MODULE = "train.checks.reduction"
WAIT_S = 120.0


class Reduction:
    """This host's ranks of it: started early, as loading torch takes long; told later where to meet."""

    def __init__(self, plan: Plan, node_rank: int, device: str) -> None:
        self._plan, self._node_rank, self._device = plan, node_rank, device
        # GPUs of one host are connected in ways of their own: each is a rank. Else a host is.
        self._ranks = plan.ranks(node_rank) if device == "cuda" else range(node_rank, node_rank + 1)
        self._world_size = plan.world_size if device == "cuda" else len(plan.hosts)
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Let it load."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        interface = interface_towards(self._plan.master_addr, spans_hosts=len(self._plan.hosts) > 1)
        if interface is not None:
            environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        for _ in self._ranks:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE, env=environment, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            self._processes.append(process)

    async def run(self, port: int) -> dict[str, Any]:
        """Meet there and add up: what the host's first rank tells, or `problem`."""
        told = [self._told(process, i, rank, port) for i, (process, rank) in enumerate(self._pairs())]
        answers: list[dict[str, Any]] = await asyncio.gather(*told)
        return next((answer for answer in answers if answer.get("problem")), answers[0])

    def _pairs(self) -> list[tuple[asyncio.subprocess.Process, int]]:
        return list(zip(self._processes, self._ranks, strict=True))

    async def _told(self, process: asyncio.subprocess.Process, local_rank: int, rank: int, port: int) -> dict[str, Any]:
        where = {
            "address": self._plan.master_addr, "port": port, "rank": rank, "world_size": self._world_size,
            "device": self._device, "local_rank": local_rank,
        }  # fmt: skip
        try:
            output, errors = await asyncio.wait_for(process.communicate(json.dumps(where).encode() + b"\n"), WAIT_S)
        except TimeoutError:
            return {"problem": f"it did not end in {WAIT_S:g} s"}
        with contextlib.suppress(ValueError, IndexError):
            answer: dict[str, Any] = json.loads(output.splitlines()[-1])
            return answer
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        return {"problem": last[0][-300:]}

    async def end(self) -> None:
        """Whatever becomes of it."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
