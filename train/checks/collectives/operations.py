"""The ten operations, with the call of torch that each one is."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from train.checks.collectives.base import Buffers, Operation, Place, synchronise
from train.checks.collectives.values import moved, summand, total

_LATE_S = 0.1


class _InPlace(Operation):
    """One tensor on each rank."""

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """The summand of this rank, in one tensor for both."""
        mine = summand(at.rank, at.size, count, dtype, at.device)
        return Buffers(mine, mine)


class AllReduce(_InPlace):
    """The sum over all ranks, on all ranks."""

    name = "all-reduce"

    @staticmethod
    def bus_factor(size: int) -> float:
        """2 (n - 1) transfers an element, over n links."""
        return 2 * (size - 1) / size

    def call(self, with_: Buffers, at: Place) -> None:
        """In place."""
        dist.all_reduce(with_.into, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The total, everywhere."""
        return total(at.size, 0, count, dtype, at.device)


class Reduce(_InPlace):
    """The sum over all ranks, on the first."""

    name = "reduce"

    def call(self, with_: Buffers, at: Place) -> None:
        """In place; the other ranks hold anything afterwards."""
        dist.reduce(with_.into, group_dst=0, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor | None:
        """The total, on the first rank."""
        return total(at.size, 0, count, dtype, at.device) if at.rank == 0 else None


class Broadcast(Operation):
    """The last rank's tensor, on all ranks."""

    name = "broadcast"

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """Something else on each rank."""
        mine = moved(at.rank, 0, count, dtype, at.device)
        return Buffers(mine, mine)

    def call(self, with_: Buffers, at: Place) -> None:
        """From the last rank: a root other than 0 is what is easily got wrong."""
        dist.broadcast(with_.into, group_src=at.size - 1, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """What the last rank holds."""
        return moved(at.size - 1, 0, count, dtype, at.device)


class _InParts(Operation):
    """A part for each rank, or of each."""

    in_parts = True

    @staticmethod
    def bus_factor(size: int) -> float:
        """One of n parts stays where it is."""
        return (size - 1) / size

    def _all(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        return torch.cat([moved(rank, 0, count, dtype, at.device) for rank in range(at.size)])

    def _whole(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        return torch.zeros(at.size * count, dtype=dtype, device=at.device)


class Gather(_InParts):
    """Each rank's part, on the first."""

    name = "gather"

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """Room for all on the first rank only."""
        room = self._whole(at, dtype, count if at.rank == 0 else 0)
        return Buffers(moved(at.rank, 0, count, dtype, at.device), room)

    def call(self, with_: Buffers, at: Place) -> None:
        """The parts are views of one tensor."""
        parts = list(with_.into.view(at.size, -1)) if at.rank == 0 else None
        dist.gather(with_.out, parts, group_dst=0, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor | None:
        """All ranks' parts in their order, on the first rank."""
        return self._all(at, dtype, count) if at.rank == 0 else None


class Scatter(_InParts):
    """The first rank's parts, one to each."""

    name = "scatter"

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """All parts on the first rank only."""
        whole = moved(0, 0, at.size * count if at.rank == 0 else 0, dtype, at.device)
        return Buffers(whole, torch.zeros(count, dtype=dtype, device=at.device))

    def call(self, with_: Buffers, at: Place) -> None:
        """The parts are views of one tensor."""
        parts = list(with_.out.view(at.size, -1)) if at.rank == 0 else None
        dist.scatter(with_.into, parts, group_src=0, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """This rank's part of what the first one had."""
        return moved(0, at.rank * count, count, dtype, at.device)


class AllGather(_InParts):
    """Each rank's part, on all ranks."""

    name = "all-gather"

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """Room for all."""
        return Buffers(moved(at.rank, 0, count, dtype, at.device), self._whole(at, dtype, count))

    def call(self, with_: Buffers, at: Place) -> None:
        """Into one tensor."""
        dist.all_gather_single(with_.into, with_.out, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """All ranks' parts in their order."""
        return self._all(at, dtype, count)


class ReduceScatter(_InParts):
    """The sum over all ranks, a part on each."""

    name = "reduce-scatter"

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """A summand as long as all parts."""
        whole = summand(at.rank, at.size, at.size * count, dtype, at.device)
        return Buffers(whole, torch.zeros(count, dtype=dtype, device=at.device))

    def call(self, with_: Buffers, at: Place) -> None:
        """From one tensor."""
        dist.reduce_scatter_single(with_.into, with_.out, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """This rank's part of the total."""
        return total(at.size, at.rank * count, count, dtype, at.device)


class AllToAll(_InParts):
    """Part d of rank r becomes part r of rank d."""

    name = "all-to-all"

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """A part for each rank."""
        return Buffers(moved(at.rank, 0, at.size * count, dtype, at.device), self._whole(at, dtype, count))

    def call(self, with_: Buffers, at: Place) -> None:
        """In equal parts."""
        dist.all_to_all_single(with_.into, with_.out, group=at.group)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """From each rank the part that is for this one."""
        return torch.cat([moved(rank, at.rank * count, count, dtype, at.device) for rank in range(at.size)])


class SendRecv(Operation):
    """Each rank sends to the next and receives from the one before, as in nccl-tests' sendrecv."""

    name = "send/recv"
    least_ranks = 2

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """One to send, one to fill."""
        return Buffers(moved(at.rank, 0, count, dtype, at.device), torch.zeros(count, dtype=dtype, device=at.device))

    def call(self, with_: Buffers, at: Place) -> None:
        """Both at once, or a ring of ranks that all send first would wait for ever."""
        pair = [  # receiving first: Gloo's word that the sender may begin must not queue behind what is sent here
            dist.P2POp(dist.irecv, with_.into, group=at.group, group_peer=(at.rank - 1) % at.size),
            dist.P2POp(dist.isend, with_.out, group=at.group, group_peer=(at.rank + 1) % at.size),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """What the rank before has sent."""
        return moved((at.rank - 1) % at.size, 0, count, dtype, at.device)


class Barrier(Operation):
    """Nobody goes on before all have come."""

    name = "barrier"
    has_data = False

    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """One number for each rank that is late once."""
        return Buffers(*(torch.zeros(size, dtype=dtype, device=at.device) for size in (1, 2)))

    def call(self, with_: Buffers, at: Place) -> None:
        """No data."""
        dist.barrier(group=at.group)

    def prove(self, with_: Buffers, at: Place) -> None:
        """First and last rank come late once each: everybody must have waited for them. Needs no common clock."""
        for place, late in enumerate((0, at.size - 1)):
            dist.all_reduce(with_.out, group=at.group)
            synchronise(at)
            began_s = time.perf_counter()
            if at.rank == late:
                time.sleep(_LATE_S)
            self.call(with_, at)
            synchronise(at)
            with_.into[place] = int(time.perf_counter() - began_s >= _LATE_S / 2)

    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """1: it has waited."""
        return torch.ones(2, dtype=dtype, device=at.device)


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        AllReduce(), Reduce(), Broadcast(), Gather(), Scatter(), AllGather(), ReduceScatter(), AllToAll(), SendRecv(),
        Barrier(),
    )
}  # fmt: skip
