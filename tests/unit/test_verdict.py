"""A rank's end, judged: kind, exit code, words."""

from __future__ import annotations

from typing import Any

import pytest

from train.launch.verdict import Failure, Kind, Verdict, cause_of, failure_of_rank, verdict_of
from train.seam import Exit

COLLECTIVE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"
HEADER = "Traceback (most recent call last):"
WEAK = "[W socket.cpp:755] The IPv6 network addresses of (node0, 29500) cannot be retrieved (gai error: -2)."


def judged(code: int, *lines: str, told: dict[str, Any] | None = None, **more: Any) -> Failure:
    usual = {"rank": 3, "code": code, "step": 412, "saved_step": 400, "oom": False, "told": told, "lines": list(lines)}
    return failure_of_rank({**usual, **more}, "node1", 1, 7.5)


def told(kind: str, exit_code: int, words: str = "words") -> dict[str, Any]:
    return {"kind": kind, "exit_code": exit_code, "words": words, "step": 412}


def test_where_it_was() -> None:
    failure = judged(-9)
    assert (failure.rank, failure.host, failure.node_rank, failure.step, failure.at_s) == (3, "node1", 1, 412, 7.5)


@pytest.mark.parametrize(
    ("kind", "exit_code", "expected", "code", "words"),
    [
        ("exception", 5, Kind.EXCEPTION, 5, "rank 3 (node1) failed at step 412: words"),
        ("collective", 5, Kind.VICTIM, 5, "rank 3 (node1) failed at step 412: words"),
        ("usage", 2, Kind.EXCEPTION, 2, "rank 3 (node1) refused to start: words"),
        ("join", 4, Kind.EXCEPTION, 4, "rank 3 (node1) failed at step 412: words"),
        ("hang", 6, Kind.HANG, 6, "rank 3 (node1) failed at step 412: words"),
        ("interrupted", 8, Kind.EXCEPTION, 8, "rank 3 (node1) at step 412: words"),
    ],
)
@pytest.mark.parametrize("status", [1, 5, -6])
def test_what_our_own_ranks_told(kind: str, exit_code: int, expected: Kind, code: int, words: str, status: int) -> None:
    """Whatever status they left with: some are ended by an abort when they have failed already."""
    failure = judged(status, COLLECTIVE, told=told(kind, exit_code))
    assert (failure.kind, failure.exit_code, failure.words) == (expected, code, words)


def test_words_that_name_the_rank_are_not_named_twice() -> None:
    words = "rank 3 of 4 did not join within 5 s"
    assert judged(4, told=told("join", 4, words)).words == words
    assert judged(4, told=told("join", 4, "rank 30 of 40 did not join")).words.startswith("rank 3 (node1) failed")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM"), (6, "SIGABRT")])
def test_signals(number: int, name: str) -> None:
    failure = judged(-number, "epoch 3")
    assert (failure.kind, failure.exit_code) == (Kind.SIGNAL, 5)
    assert failure.words == f"rank 3 (node1) was killed by signal {number} ({name}) at step 412"
    assert failure.advice


def test_a_signal_without_a_name() -> None:
    assert judged(-40).words == "rank 3 (node1) was killed by signal 40 (a real-time signal) at step 412"


def test_out_of_memory_by_the_kernels_own_word() -> None:
    failure = judged(-9, "epoch 3", oom=True)
    assert failure.words.endswith("signal 9 (SIGKILL) at step 412: out of memory, the kernel says")
    assert "micro_size" in str(failure.advice)


WORKERS = [  # what is raised where a child was killed, as torch and Python have it
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
    "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the "
    "future was running or pending.",
    "subprocess.CalledProcessError: Command '['ffmpeg']' died with <Signals.SIGKILL: 9>.",
]


@pytest.mark.parametrize("said", WORKERS)
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_worker_killed_for_want_of_memory(said: str, is_ours: bool) -> None:
    of_ours = told("exception", 5, said) if is_ours else None
    lines = () if is_ours else (HEADER, '  File "train.py", line 8, in <module>', said)
    failure = judged(1, *lines, told=of_ours, oom=True)
    place = "" if is_ours else " (train.py:8)"
    assert failure.kind is Kind.EXCEPTION
    assert failure.words == f"rank 3 (node1) failed at step 412: {said}{place}: out of memory, the kernel says"
    assert "fewer data workers" in str(failure.advice)
    assert "the kernel says" not in judged(1, *lines, told=of_ours).words


def test_memory_is_not_blamed_for_what_it_did_not_do() -> None:
    """Something else on that host, in the same control group, was killed for want of it."""
    for code, lines in ((1, (HEADER, "ValueError: bad")), (-11, ()), (-15, ()), (1, (HEADER, COLLECTIVE))):
        assert "out of memory" not in judged(code, *lines, oom=True).words


@pytest.mark.parametrize("number", [15, 1, 2, 10, 12])
def test_a_signal_that_nobody_sends_to_himself(number: int) -> None:
    advice = str(judged(-number).advice)
    assert advice.startswith("somebody or something outside that rank sent it: the batch system")
    assert "native code" not in advice
    assert "native code" in str(judged(-11).advice)


def test_a_known_line_explains_a_crash() -> None:
    failure = judged(-7, "Fatal Python error: Bus error")
    assert "signal 7 (SIGBUS) at step 412: a bus error" in failure.words
    assert "/dev/shm" in str(failure.advice)


@pytest.mark.parametrize("code", [-9, 1])
def test_a_line_that_is_also_seen_where_nothing_is_wrong_explains_nothing(code: int) -> None:
    failure = judged(code, WEAK, "ValueError: bad")
    assert "resolved" not in failure.words
    assert "DNS" not in str(failure.advice)


def test_an_abort_over_a_lost_neighbour_is_a_victims() -> None:
    """torch's watchdog thread aborts where a collective fails."""
    assert judged(-6, COLLECTIVE).kind is Kind.VICTIM
    assert judged(-11, COLLECTIVE).kind is Kind.SIGNAL
    assert judged(-9, COLLECTIVE).kind is Kind.SIGNAL


def test_a_foreign_victim() -> None:
    failure = judged(1, HEADER, COLLECTIVE, step=None)
    assert failure.kind is Kind.VICTIM
    assert failure.words == f"rank 3 (node1) lost contact with another rank: {COLLECTIVE}"


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (("ValueError: bad",), 1, "ValueError: bad"),
        (("ValueError: bad",), 3, "ValueError: bad (status 3)"),
        ((HEADER, '  File "a.py", line 1, in f', "OSError: bad", "", "bye"), 1, "OSError: bad (a.py:1)"),
        ((HEADER, '  File "a.py", line 1, in f', "OSError: bad"), 3, "OSError: bad (a.py:1, status 3)"),
        (("my.pack_age.OwnError: bad",), 1, "my.pack_age.OwnError: bad"),
        (("KeyboardInterrupt",), 1, "KeyboardInterrupt"),
        (("ValueError: first", "TypeError: second"), 1, "TypeError: second"),
        (("[rank3]: ValueError: bad",), 1, "ValueError: bad"),
        (("  ValueError: in a listing",), 4, "it ended with status 4"),
        (("all is well: Error",), 4, "it ended with status 4"),
        ((), 4, "it ended with status 4"),
        (("ValueError: " + "x" * 1000,), 1, "ValueError: " + "x" * 288),
    ],
)  # fmt: skip
def test_what_a_script_said_of_itself(lines: tuple[str, ...], code: int, said: str) -> None:
    failure = judged(code, *lines, step=None)
    assert (failure.kind, failure.words) == (Kind.EXCEPTION, f"rank 3 (node1) failed: {said}")


def test_a_gpu_is_named() -> None:
    assert judged(-9, gpu=1).words.startswith("rank 3 (node1, gpu 1) was killed")
    assert judged(-9, gpu=0).words.startswith("rank 3 (node1, gpu 0) was killed")


def test_the_cause_and_its_verdict() -> None:
    late = Failure(Kind.SIGNAL, 9.0, "late")
    early = Failure(Kind.SIGNAL, 8.0, "early", evidence=[str(n) for n in range(30)], advice="do this")
    assert cause_of([late, Failure(Kind.VICTIM, 1.0, "victim"), early]) is early
    verdict = verdict_of(early, "start")
    assert (verdict.outcome, verdict.exit_code, verdict.cause) == ("failed", 5, "early")
    assert verdict.evidence == [str(n) for n in range(18, 30)]
    assert verdict.line == "early: do this"
    assert Verdict(**verdict.as_dict()) == verdict


def test_a_verdict_of_an_end_that_was_asked_for() -> None:
    assert verdict_of(Failure(Kind.EXCEPTION, 0.0, "interrupted", Exit.STOPPED_UNSAVED)).outcome == "stopped"
    assert Verdict("finished", 0, None).line == "finished"
