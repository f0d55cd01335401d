"""What each rank puts in, and what sums of it are, worked out by hand.

Inputs are small whole numbers, chosen so that every sum, of any part of the ranks in any order, is exact in the type at
hand (bfloat16 counts to 256 without a gap). So results are compared with `==`, for any number of ranks.
"""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53, torch.int64: 2**53}
"""So far each type counts without a gap."""
_MOST_DIFFERENT = 7
_PRIME = 251


def summand(rank: int, size: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank gives to a sum: element i is 1 + (rank + i) mod m, with m small enough for an exact sum.

    Of more ranks than the type can count, only every k-th gives 1.
    """
    place = _row(rank, count, device)
    if size > _EXACT[dtype]:
        return (place % -(-size // _EXACT[dtype]) == 0).to(dtype)
    return place.remainder_(_modulus(size, dtype)).add_(1).to(dtype)


def total(size: int, start: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The sum of all ranks' summands, elements start to start + count, in closed form.

    Of `size` neighbours in a row, `size // m` times all of 0 … m-1 make m (m-1) / 2 each, and the rest is counted out.
    """
    place = _row(start, count, device)
    if size > _EXACT[dtype]:
        period = -(-size // _EXACT[dtype])
        first = -place % period  # the first rank that gives 1
        return ((size - first + period - 1) // period).to(dtype)
    modulus = _modulus(size, dtype)
    rounds, rest = divmod(size, modulus)
    ends = sum(((place + extra) % modulus for extra in range(rest)), torch.zeros_like(place))
    return (size + rounds * (modulus * (modulus - 1) // 2) + ends).to(dtype)


def moved(rank: int, start: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank sends where nothing is added up: elements start to start + count, below 252, unlike other ranks'."""
    return _row(17 * rank + start, count, device).remainder_(_PRIME).add_(1).to(dtype)


def _row(start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int32, device=device)  # int64 takes twice the time


def _modulus(size: int, dtype: torch.dtype) -> int:
    return max(1, min(_MOST_DIFFERENT, _EXACT[dtype] // size))
