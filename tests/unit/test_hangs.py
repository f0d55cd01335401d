"""Who hangs: judged from evidence as ranks and faulthandler really leave it."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.ranks import clean_environment
from train.launch.hangs import frames_of, place_of, stack_of, who_hangs

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}

SCRIPT = """
import threading, time
def idle():
    time.sleep(100)
def read():
    print("here", flush=True)
    time.sleep(100)
def train():
    read()
threading.Thread(target=idle, daemon=True).start()
train()
"""


@cache
def real_stack() -> tuple[str, ...]:
    """What faulthandler writes of a process with two threads that is asked by SIGABRT."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"exec(compile({SCRIPT!r}, '/home/me/my data.py', 'exec'))"], text=True,
        env=clean_environment(PYTHONFAULTHANDLER="1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGABRT)
    _, told = process.communicate(timeout=20)
    return tuple(told.splitlines())


def frame(place: str) -> str:
    file, line, function = place.rsplit(":", 2)
    return f'  File "{file}", line {line} in {function}'


def stack(*places: str) -> list[str]:
    """Frames `file:line:function`, innermost first, as faulthandler writes them."""
    return [
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x00007f01 (most recent call first):",
        *map(frame, places),
    ]


TORCH = "/venv/lib/python3.11/site-packages/torch"
ALL_REDUCE = [f"{TORCH}/distributed/distributed_c10d.py:2501:all_reduce", "/home/me/train.py:40:step"]
BACKWARD = [
    f"{TORCH}/autograd/graph.py:829:_engine_run_backward",
    f"{TORCH}/_tensor.py:630:backward",
    "/m/train.py:9:fit",
]
LOADING = ["/usr/lib/python3.11/selectors.py:415:select", "/home/me/data.py:88:read", "/home/me/train.py:30:step"]


def told(state: str | None = "S", *places: str, flight: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"state": state, "stack": stack(*places) if places else [], "flight": flight, **more}


def flight(
    last: int, *waits: int, op: str = "gloo:all_reduce", at: str | None = None, group: str = "0"
) -> dict[str, Any]:
    """As train/evidence.py writes it: `waits` are the collectives that are not over yet."""
    entries = [
        {"seq": seq, "op": op, "sizes": [[3]], "retired": seq not in waits, "age_s": 200.4 - seq}
        for seq in range(max(1, last - 3), last + 1)
    ]
    return {
        "time_s": 1.0, "step": 5, "phase": "step", "at": at, "stack": ["/m/train.py:1 <module>", "/m/data.py:88 read"],
        "groups": [{"name": group, "description": "step", "last": last, "entries": entries}],
    }  # fmt: skip


def test_the_rank_that_has_not_entered_a_collective() -> None:
    evidence = {
        0: told("S", *ALL_REDUCE, flight=flight(142, 142)),
        1: told("S", *ALL_REDUCE, flight=flight(142, 142)),
        2: told("S", *ALL_REDUCE, flight=flight(142, 142)),
        3: told("S", *LOADING, flight=flight(141)),
    }
    rank, words, lines = who_hangs(evidence, HOSTS)
    assert rank == 3
    assert words == "rank 3 (b) has not entered all-reduce #142; it is in data.py:88 (read); ranks 0-2 wait for 58 s"
    assert lines[:2] == ["/usr/lib/python3.11/selectors.py:415 select", "/home/me/data.py:88 read"]


def test_ages_are_those_of_the_collective_that_is_missed() -> None:
    """The others have gone on to later ones, which they start without waiting."""
    evidence = {0: told(flight=flight(10, 8, 9, 10)), 1: told("S", *LOADING, flight=flight(7))}
    rank, words, _ = who_hangs(evidence, HOSTS)
    assert rank == 1
    assert "has not entered all-reduce #8" in words
    assert words.endswith("rank 0 waits for 192 s")


def test_of_several_behind_the_furthest_is_named() -> None:
    evidence = {
        0: told(flight=flight(9, 9)),
        1: told("S", *LOADING, flight=flight(7)),
        2: told("S", *LOADING, flight=flight(8, 8)),
        3: told(flight=flight(9, 9)),
    }
    rank, words, _ = who_hangs(evidence, HOSTS)
    assert rank == 1
    assert "has not entered all-reduce #8" in words
    assert "ranks 0, 2-3 wait" in words


def test_names_of_collectives_are_words() -> None:
    for op, name in (("gloo:all_gather", "all-gather"), ("nccl:_reduce_scatter_base", "reduce scatter base"),
                     ("gloo:barrier", "barrier")):  # fmt: skip
        evidence = {0: told(flight=flight(2, 2, op=op)), 1: told("S", *LOADING, flight=flight(1, op=op))}
        assert f"has not entered {name} #2" in who_hangs(evidence, HOSTS)[1]


def test_a_rank_that_is_ahead_but_does_not_wait_blames_nobody() -> None:
    """Two ranks between two collectives: one is through, the other not quite."""
    evidence = {0: told("S", *LOADING, flight=flight(8)), 1: told("S", *LOADING, flight=flight(7))}
    assert who_hangs(evidence, HOSTS)[0] is None


def test_groups_are_compared_by_name() -> None:
    evidence = {
        0: told("S", *ALL_REDUCE, flight=flight(5, 5)),
        1: told("S", *ALL_REDUCE, flight=flight(90, 90, group="1")),
    }
    rank, words, _ = who_hangs(evidence, HOSTS)
    assert (rank, words) == (None, "all ranks wait, and none is seen to be behind the others")


def test_a_stopped_rank_comes_before_all_else() -> None:
    for state in ("T", "t"):
        evidence = {0: told(flight=flight(8, 8)), 1: told("S", *LOADING, flight=flight(7)), 2: told(state)}
        rank, words, _ = who_hangs(evidence, HOSTS)
        assert (rank, words) == (2, "rank 2 (b) is stopped (SIGSTOP, Ctrl-Z or a debugger)")


def test_a_host_that_does_not_answer() -> None:
    evidence: dict[int, dict[str, Any]] = {
        0: told(flight=flight(8, 8)),
        1: told(),
        2: {"code": None},
        3: {"code": None},
    }
    rank, words, lines = who_hangs(evidence, HOSTS)
    assert (rank, words) == (2, "nothing could be learnt of rank 2: its host b does not answer")
    assert lines == []


def test_a_rank_that_has_ended_well_while_others_wait() -> None:
    evidence = {
        0: told("S", *ALL_REDUCE, code=None),
        1: told(None, code=0),
        2: told("S", *ALL_REDUCE),
        3: told(None, code=0),
    }
    rank, words, _ = who_hangs(evidence, HOSTS)
    assert (rank, words) == (1, "rank 1 (a) has come to its end already; ranks 0, 2 wait for it")


def test_all_that_ended_well_are_no_hang_of_theirs() -> None:
    assert who_hangs({0: told(None, code=0), 1: told(None, code=0)}, HOSTS)[0] is None


def test_by_stacks_alone() -> None:
    """A script that is not ours: no flight record."""
    evidence = {0: told("S", *ALL_REDUCE), 1: told("S", *BACKWARD), 2: told("R", *LOADING), 3: told("S", *ALL_REDUCE)}
    rank, words, lines = who_hangs(evidence, HOSTS)
    assert (rank, words) == (2, "rank 2 (b) is in data.py:88 (read); ranks 0-1, 3 wait for it")
    assert lines[-1] == "/home/me/train.py:30 step"


def test_ranks_that_wait_in_different_places_are_told_with_their_places() -> None:
    other = [f"{TORCH}/distributed/distributed_c10d.py:4000:barrier", "/home/me/train.py:55:save"]
    evidence = {0: told("S", *ALL_REDUCE), 1: told("S", *other), 2: told("S", *ALL_REDUCE)}
    rank, words, lines = who_hangs(evidence, HOSTS)
    assert rank is None
    assert "ranks 0, 2 are in train.py:40 (step)" in words
    assert "rank 1 is in train.py:55 (save)" in words
    assert lines == [
        "rank 0 (a): train.py:40 (step)",
        "rank 1 (a): train.py:55 (save)",
        "rank 2 (b): train.py:40 (step)",
    ]


def test_with_nothing_known_nobody_is_blamed() -> None:
    rank, words, lines = who_hangs({0: told(), 1: told("D")}, HOSTS)
    assert (rank, words) == (None, "all ranks wait, and none is seen to be behind the others")
    assert lines == ["rank 0 (a): unknown", "rank 1 (a): unknown"]


# Stacks.


def test_a_real_stack() -> None:
    """Of its main thread alone, and with a blank in a file's name."""
    lines = real_stack()
    assert lines[0] == "Fatal Python error: Aborted"
    inner, outer, *_ = [(Path(file).name, line, function) for file, line, function in frames_of(lines)]
    assert inner in (("my data.py", 6, "read"), ("my data.py", 7, "read"))  # still printing, or asleep
    assert outer == ("my data.py", 9, "train")
    assert "idle" not in [function for _, _, function in frames_of(lines)]
    assert place_of({"stack": list(lines)}) == f"my data.py:{inner[1]} (read)"
    assert stack_of({"stack": list(lines)})[0] == f"/home/me/my data.py:{inner[1]} read"


def test_where_a_rank_is_without_a_stack_is_what_it_told_itself() -> None:
    assert place_of({"flight": flight(1, at="/home/me/data.py:88 read")}) == "data.py:88 (read)"
    assert stack_of({"flight": flight(1)}) == ["/m/data.py:88 read", "/m/train.py:1 <module>"]
    assert place_of({}) is None
    assert place_of({"stack": ["no", "stack"], "flight": {"at": None}}) is None
    assert stack_of({"flight": None}) == []


def test_a_place_in_libraries_alone_is_the_innermost() -> None:
    assert place_of(told("S", f"{TORCH}/x.py:1:f", f"{TORCH}/y.py:2:g")) == "x.py:1 (f)"
    assert place_of(told("S", f"{TORCH}/x.py:1:f", "/home/me/a.py:7:main")) == "a.py:7 (main)"


def test_a_long_stack_is_cut() -> None:
    assert len(stack_of(told("S", *(f"/a.py:{line}:f" for line in range(1, 50))))) == 12
