"""How the ranks meet, on which device, and how they part: process group, device, seeds, time-outs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from train.config import RuntimeConfig
from train.errors import UsageError
from train.identity import Identity
from train.meeting import meet
from train.network import interface_towards, interfaces
from train.progress import log
from train.seam import Phase
from train.seeds import mix

T = TypeVar("T")


class Runtime:
    """One rank's device and its ties to the other ranks.

    Each phase has a time-out of its own, and so a process group of its own: steps on the chosen backend,
    evaluation and saving on Gloo with tensors on the CPU.
    """

    def __init__(
        self, me: Identity, config: RuntimeConfig, *, threads: int = 1, group: bool = True, has_agent: bool = False
    ) -> None:
        """Choose the device and join the others. Raises UsageError and JoinError.

        Args:
            me: this rank's place.
            config: device, backend, interface and time-outs.
            threads: CPU threads this rank computes with.
            group: also make a process group for a single rank.
            has_agent: a node agent judges who hangs, and knows who it is: torch's own time-outs come later.
        """
        self.me = me
        self._config = config
        self._has_agent = has_agent
        self.host = socket.gethostname()
        self.device = _choose_device(me, config)
        self.backend = _choose_backend(config, self.device)
        self._groups: dict[Phase, dist.ProcessGroup] = {}
        torch.set_num_threads(threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        known = interfaces()
        if config.interface and config.interface not in known:
            raise UsageError(f"runtime.interface: this host has no {config.interface!r}; it has {', '.join(known)}")
        if group or me.world_size > 1:
            self._join(config)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.me.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.me.world_size

    @property
    def joined(self) -> bool:
        """Whether there is a process group."""
        return bool(self._groups)

    def group(self, phase: Phase) -> dist.ProcessGroup | None:
        """The process group whose time-out is this phase's; None for a lone process."""
        return self._groups.get(phase)

    def _join(self, config: RuntimeConfig) -> None:
        gpu = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""
        store, cards = meet(self.me, f"{self.host} {gpu}", config.join_timeout_s)
        self._share_gpus(cards, config)
        _set_interface(self.me, config, spans_hosts=len({card.split()[0] for card in cards}) > 1)
        first_wait = self._wait(Phase.FIRST_STEP)
        store.set_timeout(first_wait)
        dist.init_process_group(
            self.backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=first_wait,
            # Bound at once: a rank that picked a wrong device fails here, and barriers know their device.
            device_id=self.device if self.backend == "nccl" else None,
        )
        assert dist.group.WORLD is not None
        self._groups[Phase.STEP] = dist.group.WORLD
        for phase in (Phase.EVALUATION, Phase.SAVING):
            self._groups[phase] = dist.new_group(backend="gloo", timeout=self._wait(phase), group_desc=phase.words)

    def _wait(self, phase: Phase) -> timedelta:
        budget_s = self._config.budget_s(phase)
        return timedelta(seconds=2 * budget_s + 60 if self._has_agent else budget_s)

    def end_first_step(self) -> None:
        """The first step had a time-out of its own; from here on that of every step counts."""
        if self.joined:
            _set_pg_timeout(self._wait(Phase.STEP), self.group(Phase.STEP))

    def _share_gpus(self, cards: Sequence[str], config: RuntimeConfig) -> None:
        """NCCL wants a GPU for each rank; where two have one between them, Gloo carries the tensors instead."""
        if self.backend != "nccl" or len(set(cards)) == len(cards):
            return
        twins = [str(rank) for rank, card in enumerate(cards) if cards.count(card) > 1]
        if config.backend == "nccl":
            raise UsageError(f"runtime.backend: nccl needs a GPU for each rank, but ranks {', '.join(twins)} share one")
        self.backend = "gloo"
        if self.rank == 0:
            log.warning(f"ranks {', '.join(twins)} share a GPU: using gloo, which is slower than nccl")

    def gather(self, value: Any, phase: Phase = Phase.SAVING) -> list[Any]:
        """Each rank's value, in rank order, on every rank. For small things: it pickles."""
        if not self.joined:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group(phase))
        return values

    def broadcast(self, value: Any, phase: Phase = Phase.SAVING) -> Any:
        """Rank 0's value on every rank. For small things: it pickles."""
        if not self.joined:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group(phase))
        return box[0]

    def broadcast_tensor(self, tensor: torch.Tensor, phase: Phase = Phase.SAVING) -> None:
        """Rank 0's values into every rank's CPU tensor."""
        if self.joined:
            dist.broadcast(tensor, src=0, group=self.group(phase))

    def sum(self, tensor: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Sum over the ranks of a small tensor, on the CPU."""
        total = tensor.detach().cpu()
        if self.joined:
            dist.all_reduce(total, group=self.group(phase))
        return total

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns, once it has succeeded on every rank.

        Raises UsageError on all ranks where it was raised on one: nobody is left waiting for a rank that gave up.
        """
        made: T | None = None
        problem = ""
        try:
            made = make()
        except UsageError as error:
            problem = str(error)
        told = self.gather((self.host, problem))
        problems = {theirs for _, theirs in told}
        if problems == {problem} and problem:
            raise UsageError(problem.splitlines())
        if problems != {""}:
            lines = ((rank, host, line) for rank, (host, theirs) in enumerate(told) for line in theirs.splitlines())
            raise UsageError(f"rank {rank} ({host}): {line}" for rank, host, line in lines)
        return made  # type: ignore[return-value]

    def agree(self, facts: Mapping[str, str], advice: Mapping[str, str]) -> None:
        """Compare facts that must be equal on all ranks. Raises UsageError that names ranks and hosts."""
        told = self.gather((self.host, dict(facts)))
        problems = []
        for name in facts:
            ranks_by_value: dict[str, list[str]] = {}
            for rank, (host, theirs) in enumerate(told):
                ranks_by_value.setdefault(theirs[name], []).append(f"{rank} ({host})")
            if len(ranks_by_value) > 1:
                seen = "; ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
                problems.append(f"{name} differs between ranks: {seen}: {advice.get(name, advice.get('', ''))}")
        if problems:
            raise UsageError(problems)

    def reseed(self, seed: int, step: int) -> None:
        """Make what is random from here on a function of (seed, step, rank) alone."""
        mixed = mix(seed, step, self.rank)
        torch.default_generator.manual_seed(mixed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(mixed)

    def close(self) -> None:
        """Part in good order: all ranks have come through, so nobody leaves while another still needs it.

        Only after success. A rank that failed must not wait for others, nor be waited for: it just exits.
        """
        if self.joined:
            dist.barrier(group=self.group(Phase.SAVING))
            dist.destroy_process_group()
            self._groups = {}


def _choose_device(me: Identity, config: RuntimeConfig) -> torch.device:
    """The rank's device by logical index: CUDA_VISIBLE_DEVICES has already renumbered them from 0."""
    count = torch.cuda.device_count() if config.device != "cpu" else 0
    if count == 0:
        if config.device == "cuda":
            raise UsageError(
                f"runtime.device is cuda, but rank {me.rank} sees no GPU (torch {torch.__version__}, "
                f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')!r}): check the driver, "
                "the container's GPU options and torch's build, or ask for runtime.device cpu"
            )
        return torch.device("cpu")
    if count == 1:  # bound by the launcher, one GPU a rank; or there is only one
        return torch.device("cuda", 0)
    index = me.rank % count if me.local_rank is None else me.local_rank
    if index >= count:
        raise UsageError(
            f"rank {me.rank} is number {index} on this host, but the host shows it {count} GPUs: "
            f"start at most {count} ranks a host, or show it more GPUs"
        )
    return torch.device("cuda", index)


def _choose_backend(config: RuntimeConfig, device: torch.device) -> str:
    if config.backend == "nccl" and device.type == "cpu":
        raise UsageError(
            f"runtime.backend is nccl, but this host shows no GPU (torch {torch.__version__}): use gloo or auto"
        )
    if config.backend != "auto":
        return config.backend
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def _set_interface(me: Identity, config: RuntimeConfig, *, spans_hosts: bool) -> None:
    """Give Gloo and NCCL one concrete interface each, unless the user has: the one that routes to the master."""
    if me.world_size == 1 or me.master_addr is None:
        return
    name = config.interface or interface_towards(me.master_addr, spans_hosts=spans_hosts)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = os.environ.get(variable)
        if given and not config.interface:
            if me.source != "agent":  # which has chosen it itself, or said so
                log.info(f"{variable}={given} is set: taken as it is")
        elif name:
            os.environ[variable] = name
