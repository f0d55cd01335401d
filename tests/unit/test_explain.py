"""`explain`: a run's verdict in words, and what known failures left in any log."""

from __future__ import annotations

import contextlib
import io
import json
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import ROOT, clean_environment
from tests.unit.signature_samples import SAMPLES
from train.launch.explain import main
from train.launch.log_scan import Scan, lines_with_marks, who_of

QUICK = settings(max_examples=60, deadline=None, database=None)
OOM = next(line for name, line, _ in SAMPLES if name == "cuda-oom")
GONE = next(line for name, line, _ in SAMPLES if name == "peer-gone")
FULL = next(line for name, line, _ in SAMPLES if name == "disk-full")
VERDICT = {
    "outcome": "failed", "exit_code": 5, "cause": "rank 3 (node1) was killed by signal 9 at step 412", "host": "node1",
    "node_rank": 1, "rank": 3, "step": 412, "evidence": ["step 411 loss 3.2", "Killed"],
    "advice": "give the job more memory",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_runs_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUSTER_RUNS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def said(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def explained(*words: str) -> str:
    code, out, err = said(*words)
    assert (code, err) == (0, "")
    return out


def log(name: str, *lines: str | bytes) -> str:
    """A log in the current folder."""
    text = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text + b"\n")
    return name


def run(verdict: dict[str, object] | None, logs: dict[str, Sequence[str]] | None = None) -> str:
    """A run folder `runs/demo`."""
    folder = Path("runs/demo")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    if verdict is not None:
        (folder / "verdict.json").write_text(json.dumps(verdict))
    for name, lines in (logs or {}).items():
        log(f"runs/demo/logs/{name}", *lines)
    return "demo"


# Logs of anybody


def test_the_cause_its_place_and_what_to_do() -> None:
    out = explained(log("train.log", "step 1", "step 2", OOM, "", "bye"))
    assert out.splitlines() == [
        "cause: rank 3: GPU 3 was full: 20.00 MiB wanted, 17.75 MiB of 79.15 GiB free",
        out.splitlines()[1],
        "where: train.log, line 3",
        f"  {OOM}",
    ]
    assert out.splitlines()[1].startswith("what to do: make batch.micro_size smaller")


def test_a_cause_is_told_before_the_victims_that_came_first() -> None:
    out = explained(log("train.log", GONE, GONE, OOM, "[rank7]: " + GONE.removeprefix("[rank0]: ")))
    assert out.startswith("most probable cause: rank 3: GPU 3 was full")
    assert "  train.log:1: rank 0: another rank ended in mid-talk (2 times)" in out
    assert "  train.log:4: rank 7: another rank ended in mid-talk\n" in out


def test_several_logs_are_one_failure() -> None:
    out = explained(log("node1.log", GONE), log("node2.log", FULL))
    assert out.startswith("most probable cause: a disk is full")
    assert "where: node2.log, line 1" in out


def test_nothing_known_is_said_and_is_no_error() -> None:
    assert explained(log("train.log", "step 1", "ValueError: x")).startswith("nothing known was found")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"a\n{OOM}".encode())))
    assert "where: (standard input), line 2" in explained("-")


def test_a_long_list_is_cut_and_json_has_all() -> None:
    name = log("many.log", OOM, *(f"[rank{i}]: {GONE}" for i in range(10, 40)))
    out = explained(name)
    assert "  and 18 more (--json has all)" in out
    (told,) = json.loads(explained(name, "--json"))
    assert len(told["findings"]) == 31
    assert {k: told["findings"][0][k] for k in ("name", "kind", "line_number", "rank", "count")} == {
        "name": "cuda-oom", "kind": "exception", "line_number": 1, "rank": 3, "count": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "rank", "host"),
    [
        ("node1 rank 3 | " + FULL, 3, "node1"),
        ("rank 12 | " + FULL, 12, None),
        ("[rank3]: " + FULL, 3, None),
        ("[rank0]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog", 0, None),
        ("[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught", 1, None),
        ("[1,4]<stderr>:" + FULL, 4, None),
        ("[1,4]<stderr>:[rank7]: " + FULL, 7, None),
        ("3: " + FULL, 3, None),
        (" 3: " + FULL, 3, None),
        ("node1: " + FULL, None, "node1"),
        ("gpu-7.cluster: " + FULL, None, "gpu-7.cluster"),
        ("node1-1  | [rank3]: " + FULL, 3, "node1"),
        ("node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect", None, "node5"),
        ("srun: error: nid001277: tasks 1-3: Out Of Memory", 1, "nid001277"),
        (FULL, None, None),
        ("OSError: [Errno 28] No space", None, None),
        ("slurmstepd: error: Detected 1 oom_kill event", None, None),
        ("12:30:01 step 3", None, None),
    ],
)
def test_whose_line_it_is(line: str, rank: int | None, host: str | None) -> None:
    assert who_of(line) == (rank, host)


def test_a_progress_bar_without_an_end_hides_no_failure() -> None:
    bar = "\r".join(f"Epoch 0: {i}%|####    |" for i in range(200_000))
    out = explained(log("bar.log", "start", bar + f"\r\x1b[31m{OOM}\x1b[0m"))
    assert "where: bar.log, line 2" in out
    assert f"\n  {OOM}\n" in out


@pytest.mark.parametrize("size", [0, 1, 4000, (1 << 20) - 30, 1 << 20, (1 << 20) + 1, (2 << 20) - 30, 3 << 20])
def test_a_failure_is_found_wherever_blocks_end(size: int) -> None:
    for filler in (b"x" * size, b"x" * (size // 2) + b"\n" + b"y" * (size // 2)):
        data = filler + FULL.encode() + b"\n" + OOM.encode()
        found = list(lines_with_marks(io.BytesIO(data)))
        numbers = {number for number, line in found if "space left" in line}
        assert numbers == {1 + filler.count(b"\n")}
        assert [n for n, line in found if "Tried to allocate 20.00 MiB. GPU 3" in line] == [2 + filler.count(b"\n")]


@pytest.mark.parametrize("before", [20, 100, 280, 320, 360])
def test_a_line_of_a_progress_bar_is_looked_at_whole(before: int) -> None:
    """What a failure needs of its line may stand on both sides of where a block ends."""
    bar = b"\r".join([b"x" * 63] * (1 << 15))[:-before]
    found = [line for _, line in lines_with_marks(io.BytesIO(bar + b"\r" + OOM.encode() + b"\r" + b"y" * (1 << 20)))]
    assert found == [OOM]


@QUICK
@given(st.lists(st.sampled_from(["", "x", FULL, OOM, "y" * 3000, "\t"]), max_size=30), st.integers(1, 4000))
def test_line_numbers_are_those_of_an_editor(lines: list[str], size: int) -> None:
    class Trickle(io.BytesIO):  # a pipe gives what it has
        def read(self, _: int | None = -1) -> bytes:
            return super().read(size)

    found = [number for number, _ in lines_with_marks(Trickle("\n".join(lines).encode()))]
    assert found == [i + 1 for i, line in enumerate(lines) if line in (FULL, OOM)]


@QUICK
@given(st.binary(max_size=3000))
def test_binary_garbage_is_no_trouble(data: bytes) -> None:
    scan = Scan()
    scan.read(io.BytesIO(data + b"\n\xff\xfe" + FULL.encode() + b"\x00" + data), "core")
    assert "disk-full" in {at.finding.signature.name for at in scan.findings()}


def test_what_is_shown_has_no_control_characters_and_an_end() -> None:
    out = explained(log("x.log", b"\x1b]0;title\x07\x08" + FULL.encode() + b" \xff" + b"z" * 10_000))
    assert all(line.isprintable() for line in out.splitlines())
    assert max(map(len, out.splitlines())) < 500


def test_a_large_log_takes_little_memory(tmp_path: Path) -> None:
    noise = random.Random(0)
    path = tmp_path / "large.log"
    with path.open("wb") as file:
        for _ in range(24):
            file.write(noise.randbytes(1 << 19) + b"step 1 loss 2\n" * 40_000)
        file.write(b"w" * (30 << 20) + FULL.encode())
    tracemalloc.start()
    scan = Scan()
    with path.open("rb") as stream:
        scan.read(stream, "large.log")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "disk-full" in {at.finding.signature.name for at in scan.findings()}
    assert peak < 16 << 20


# Exceptions that are not known

HEADER = "Traceback (most recent call last):"
LABEL = [HEADER, '  File "/home/ann/my train.py", line 88, in loss', "    return weights[name]",
         '  File "/v/lib/python3.11/site-packages/x.py", line 3, in get', "KeyError: 'label_17'"]  # fmt: skip
TORCHRUN = next(line for name, line, _ in SAMPLES if name == "torchrun-failed")
WEAK = next(line for name, line, _ in SAMPLES if name == "c10d-name")
CHILD_FAILED = [HEADER, '  File "/v/bin/torchrun", line 8, in <module>',
                "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60]  # fmt: skip


def each(prefix: str, lines: Sequence[str]) -> list[str]:
    return [prefix + line for line in lines]


def test_an_exception_is_named_before_victims_and_what_torchrun_says() -> None:
    victim = [*each("[rank0]: ", [HEADER, '  File "train.py", line 70, in <module>']), GONE]
    lines = [WEAK, "step 3", *victim, *each("[rank1]: ", LABEL), TORCHRUN, *CHILD_FAILED]
    out = explained(log("train.log", *lines))
    assert out.splitlines()[:4] == [
        "most probable cause: rank 1: it raised KeyError: 'label_17' (my train.py:88)",
        "what to do: the traceback there tells how it came to it",
        "where: train.log, line 10",
        "  KeyError: 'label_17'",
    ]
    assert "ChildFailedError" not in out
    assert "ended with status" in out.split("found too")[1]


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("", ""),
        ("[rank1]: ", "rank 1: "),
        ("node1 rank 1 | ", "rank 1 (node1): "),
        ("node1 rank 1 | [rank1]: ", "rank 1 (node1): "),
        ("2026-11-30 12:00:00.123 ", ""),
        ("node1-1  | [rank3]: ", "rank 3 (node1): "),
        ("[1,4]<stderr>:", "rank 4: "),
        ("3: ", "rank 3: "),
    ],
)
def test_whose_traceback_it_is(prefix: str, who: str) -> None:
    out = explained(log("train.log", *each(prefix, LABEL), "step 4"))
    assert out.startswith(f"cause: {who}it raised KeyError: 'label_17' (my train.py:88)\n")


def test_ranks_that_write_at_a_time() -> None:
    bad = [HEADER, '  File "a.py", line 1, in f', "ValueError: bad"]
    pairs = zip(each("[rank1]: ", LABEL), each("[rank0]: ", [*bad, "", ""]), strict=True)
    out = explained(log("train.log", *(line for pair in pairs for line in pair)))
    assert out.startswith("most probable cause: rank 0: it raised ValueError: bad (a.py:1)\n")
    assert "  train.log:9: rank 1: it raised KeyError: 'label_17' (my train.py:88)\n" in out


def test_what_is_known_of_an_exception_is_told_instead() -> None:
    out = explained(log("train.log", HEADER, '  File "a.py", line 1, in f', OOM.removeprefix("[rank3]: ")))
    assert out.startswith("cause: GPU 3 was full")


def test_a_known_cause_goes_before_an_exception_and_that_before_a_victims() -> None:
    lost = [HEADER, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, internal error"]
    out = explained(log("a.log", *lost, *LABEL, FULL))
    assert out.startswith("most probable cause: a disk is full")
    told = [line for line in out.splitlines() if line.startswith("  a.log:")]
    assert ["it raised KeyError" in told[0], "DistBackendError" in told[1]] == [True, True]


def test_the_last_of_a_chain_counts_and_what_python_went_on_from_does_not() -> None:
    chained = ["", "During handling of the above exception, another exception occurred:", "", HEADER, "Odd: b"]
    ignored = ["Exception ignored in: <function D.__del__ at 0x7f>", HEADER, "RuntimeError: late"]
    out = explained(log("a.log", *LABEL, *chained, *ignored, "--- Logging error ---", HEADER, "TypeError: format"))
    assert out.startswith("cause: it raised Odd: b\n")
    assert "also" not in out and "late" not in out and "format" not in out


def test_what_ended_a_thread_alone_comes_after_what_ended_the_program() -> None:
    thread = ["Exception in thread Thread-1 (f):", *LABEL]
    assert explained(log("a.log", "x", *thread)).startswith("cause: it raised KeyError: 'label_17'")
    out = explained(log("a.log", *each("[rank0]: ", thread), "step 3", *each("[rank2]: ", [HEADER, "Odd: b"])))
    assert out.startswith("most probable cause: rank 2: it raised Odd: b\n")
    assert "  a.log:6: rank 0: it raised KeyError" in out


def test_a_group_of_exceptions() -> None:
    group = ["  + Exception Group " + HEADER, '  |   File "a.py", line 4, in f', "  | ExceptionGroup: two (2 of them)",
             "  +-+---------------- 1 ----------------", "    | " + HEADER, '    |   File "b.py", line 5, in g',
             "    | ValueError: a", "    +------------------------------------"]  # fmt: skip
    for prefix in ("", "[rank1]: "):
        out = explained(log("a.log", *each(prefix, group)))
        assert "it raised ExceptionGroup: two (2 of them), the first: ValueError: a (b.py:5)\n" in out
        assert out.startswith("cause: ")


@QUICK
@given(st.lists(st.sampled_from([*LABEL, *each("[rank1]: ", LABEL), "  + Exception Group " + HEADER, "  | x", "",
                                 "During handling of the above exception, another exception occurred:"])))  # fmt: skip
def test_torn_tracebacks_are_no_trouble(lines: list[str]) -> None:
    scan = Scan()
    scan.read(io.BytesIO("\n".join(lines).encode()), "a.log")
    assert len(scan.findings()) <= lines.count("KeyError: 'label_17'") + lines.count(each("[rank1]: ", LABEL)[-1]) + 9


def test_a_log_of_nothing_but_tracebacks_takes_no_time() -> None:
    data = "\n".join([*LABEL, *each("[rank1]: ", LABEL[:2])] * 5000).encode()
    began = time.perf_counter()
    scan = Scan()
    scan.read(io.BytesIO(data), "a.log")
    assert time.perf_counter() - began < 10
    assert [at.number for at in scan.findings()] == [5]


# Who is behind


def state(rank: int, enqueued: int) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        "Exception (either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: "
        f"{enqueued}, last completed NCCL work: 807."
    )


TIMEOUT = next(line for name, line, _ in SAMPLES if name == "nccl-timeout")


@pytest.mark.parametrize(
    ("enqueued", "words"),
    [
        ({0: 811, 1: 811, 2: 807, 3: 811}, "rank 2 had begun collective #807 when others had begun #811: it is behind"),
        ({0: 811, 1: 811, 3: 811}, "rank 2 reported nothing while the others timed out: it hangs, or was gone before"),
        ({0: 811, 1: 811}, None),
        ({5: 811}, None),
    ],
)
def test_nccls_reports_name_the_rank_that_the_others_waited_for(enqueued: dict[int, int], words: str | None) -> None:
    out = explained(log("nccl.log", TIMEOUT, *(state(rank, number) for rank, number in enqueued.items())))
    assert words is None or words in out
    assert ("NCCL's reports: " in out) == (words is not None)


# Runs


def test_a_failed_runs_verdict_and_what_its_logs_add() -> None:
    name = run(VERDICT, {"node1-node1/rank3.log": ["step 411", FULL], "node0-node0/rank0.log": [GONE]})
    lines = explained(name).splitlines()
    assert lines[:6] == [
        "run demo failed (exit code 5): rank 3 (node1) was killed by signal 9 at step 412",
        "what to do: give the job more memory",
        "evidence:",
        "  step 411 loss 3.2",
        "  Killed",
        "",
    ]
    assert lines[6:8] == ["its logs say:", "most probable cause: rank 3 (node1): a disk is full, or its quota used up"]
    assert lines[-1] == "  runs/demo/logs/node0-node0/rank0.log:1: rank 0 (node0): another rank ended in mid-talk"


def test_of_equal_failures_the_verdicts_rank_comes_first() -> None:
    name = run(VERDICT, {"node0-a/rank0.log": [FULL], "node1-b/rank3.log": [FULL]})
    assert "most probable cause: rank 3 (b): a disk is full" in explained(name)


def test_a_finished_runs_logs_are_left_alone() -> None:
    name = run({**VERDICT, "outcome": "finished", "exit_code": 0, "cause": None, "rank": None, "evidence": [],
                "advice": None}, {"node0-a/rank0.log": [FULL]})  # fmt: skip
    assert explained(name) == "run demo finished at step 412 (exit code 0)\n"


def test_a_run_is_found_by_name_or_by_path() -> None:
    run({**VERDICT, "evidence": []})
    head = "run demo failed (exit code 5)"
    assert explained("demo").startswith(head)
    assert explained("runs/demo").startswith(head)


def test_runs_folders_are_taken_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(VERDICT)
    monkeypatch.chdir("/")
    assert said("demo")[0] == 2
    assert explained("demo", "--runs_dir", str(tmp_path / "runs")).startswith("run demo failed")
    monkeypatch.setenv("MUSTER_RUNS_DIR", str(tmp_path / "runs"))
    assert explained("demo").startswith("run demo failed")


def test_a_run_without_a_verdict_says_so_and_its_logs_are_read() -> None:
    out = explained(run(None, {"node0-a/rank0.log": [FULL]}))
    assert out.startswith("run demo has no verdict: it still runs, or all that could have written one was killed")
    assert "cause: rank 0 (a): a disk is full" in out


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00"])
def test_a_damaged_verdict_is_told_and_hides_nothing(text: str) -> None:
    name = run(None, {"node0-a/rank0.log": [FULL]})
    Path("runs/demo/verdict.json").write_text(text)
    code, out, err = said(name)
    assert "cause: rank 0 (a): a disk is full" in out
    assert (code, "cannot read" in err) == ((0, False) if text == "[]" else (2, True))


# Refusals


def test_what_is_not_there_is_told_and_the_rest_is_still_explained() -> None:
    code, out, err = said("nosuch", log("a.log", FULL), ".")
    assert code == 2
    assert out.startswith("cause: a disk is full")
    assert "there is no run 'nosuch' in " in err
    assert ". is a folder, but not that of a run: name the logs in it" in err
    assert said("nosuch")[1] == ""


def test_a_file_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = log("secret.log", FULL)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    code, _, err = said(name)
    assert (code, err) == (2, "cannot read secret.log: Permission denied\n")


def test_help_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "kubectl logs job/train | python -m train explain -" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["x", "--nonsense"]) == 2


def test_explaining_needs_neither_torch_nor_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(FULL)
    script = (
        f"import sys; from train.launch.explain import main; code = main(['{tmp_path}/a.log']); "
        "print(code, [m for m in ('torch', 'yaml', 'jsonargparse', 'rich', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
