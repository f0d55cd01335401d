"""Who belongs to a start, and that all of it ends when its agent vanishes: with real processes.

Whatever is found here is killed, and often by root: so first look that nothing but our own was found (`Stage.ours`).
A keeper that took all processes of the machine for its own has once ended them all. Try a change of `members` in a
PID namespace: `unshare --pid --fork --mount-proc`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import clean_environment
from train.launch import keeper
from train.seam import START_ID, STATUS_PAGE

RANK = "import os, sys, time\n"
ASLEEP = "time.sleep(60)\n"


class Stage:
    """A start's folder, and what runs in its name. Everything that was started here is ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "muster-abc-xyz"
        self.folder.mkdir()
        self.pids = folder / "pids"
        self.pids.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        self.own: set[int] = set()

    def start(self, script: str, **more: str) -> subprocess.Popen[bytes]:
        marks = {START_ID: "abc", STATUS_PAGE: str(self.folder / "rank0.page"), "PIDS": str(self.pids)}
        environment = {**clean_environment(), **marks, **more}
        command = [sys.executable, "-I", "-S", "-c", RANK + script]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.started.append(process)
        return process

    def ours(self, found: set[int]) -> set[int]:
        """These process ids, if they are all of what was started here."""
        self.own |= {process.pid for process in self.started} | keeper.descendants(os.getpid())
        self.own |= {int(path.read_text() or 0) for path in self.pids.iterdir()}
        foreign = sorted(found - self.own)
        assert not foreign, f"processes that are none of this test's would be killed: {foreign[:10]}"
        return found

    def pid(self, name: str) -> int:
        """What a process wrote by `note(name)`."""
        path = self.pids / name
        wait_for(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        for path in self.pids.iterdir():
            pid = int(path.read_text())
            if is_running(pid) and keeper.environment_of(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def note(name: str) -> str:
    return f"open(os.environ['PIDS'] + '/{name}', 'w').write(str(os.getpid()))\n"


IF_CHILD = "if os.fork() == 0:\n    "
FORKS = {
    "child": f"{IF_CHILD}{note('left')}    time.sleep(60)\n",
    "child with its own session": f"{IF_CHILD}os.setsid()\n    {note('left')}    time.sleep(60)\n",
    "orphan": f"{IF_CHILD}os.fork() and os._exit(0)\n    {note('left')}    time.sleep(60)\nos.wait()\n",
    "orphan with its own session": (
        f"{IF_CHILD}os.setsid()\n    os.fork() and os._exit(0)\n    {note('left')}    time.sleep(60)\nos.wait()\n"
    ),
    "another program without environment": (
        f"{IF_CHILD}os.setsid()\n    {note('left')}    os.execve('/bin/sleep', ['sleep', '60'], {{}})\n"
    ),
}


def is_running(pid: int) -> bool:
    process = keeper.look_at(pid)
    return process is not None and process.state not in "ZX"


def began() -> int:
    """When this process did, which plays the agent."""
    me = keeper.look_at(os.getpid())
    assert me is not None
    return me.began


def wait_for(what: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", FORKS)
def test_what_a_rank_leaves_is_found(stage: Stage, kind: str) -> None:
    rank = stage.start(FORKS[kind] + ASLEEP)
    left = stage.pid("left")
    found = keeper.members({str(stage.folder)}, {rank.pid})
    assert {rank.pid, left} <= found
    assert os.getpid() not in found
    assert keeper.end_all(lambda: stage.ours(keeper.members({str(stage.folder)}, {rank.pid}))) == set()
    assert not is_running(left)
    assert rank.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("kind", [kind for kind in FORKS if "without" not in kind])
def test_the_mark_alone_finds_what_the_rank_left_when_it_is_gone(stage: Stage, kind: str) -> None:
    rank = stage.start(FORKS[kind] + "sys.exit()\n")
    left = stage.pid("left")
    rank.wait(10)
    assert keeper.members({str(stage.folder)}, set()) == {left}


@pytest.mark.parametrize("kind", FORKS)
def test_nothing_gets_away_from_an_agent_that_takes_in_orphans(stage: Stage, kind: str) -> None:
    """Its rank has ended, and what that left has no environment, no parent and no session in common with it."""
    fork = "".join(f"    {line}\n" for line in FORKS[kind].splitlines())
    script = f"import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n{IF_CHILD}os.setsid()\n{fork}    os._exit(0)\n"
    reap = "while True:\n    os.wait()\n    time.sleep(0.01)\n"
    agent = stage.start(f"{script}if os.fork() == 0:\n    time.sleep(60)\n{note('agent')}{reap}")
    left = stage.pid("left")
    stage.pid("agent")
    wait_for(lambda: len(keeper.descendants(agent.pid)) == 2)
    assert left in stage.ours(keeper.descendants(agent.pid))
    assert keeper.end_all(lambda: stage.ours(keeper.descendants(agent.pid))) == set()
    assert not is_running(left)


def test_other_starts_are_left_alone_even_with_the_same_id(stage: Stage, tmp_path: Path) -> None:
    """Two agents of one job on one machine, or folders one of whose names begins with the other's."""
    other = stage.start(note("other") + ASLEEP, **{STATUS_PAGE: f"{stage.folder}2/rank0.page"})
    bare = stage.start(note("bare") + ASLEEP, **{STATUS_PAGE: ""})
    stage.pid("other"), stage.pid("bare")
    found = keeper.members({str(stage.folder)}, {os.getpid() + 10**6})
    assert found.isdisjoint({other.pid, bare.pid})
    assert keeper.members(set(), set()) == set()


def test_what_ran_before_the_agent_is_never_found(stage: Stage) -> None:
    """Not even with its mark and in its session."""
    rank = stage.start(note("rank") + ASLEEP)
    stage.pid("rank")
    told = keeper.look_at(rank.pid)
    assert told is not None
    assert keeper.members({str(stage.folder)}, {rank.pid}, since=told.began) == {rank.pid}
    assert keeper.members({str(stage.folder)}, {rank.pid}, since=told.began + 1) == set()


def test_who_asks_and_who_is_spared_are_not_found(stage: Stage) -> None:
    rank = stage.start(note("rank") + ASLEEP)
    stage.pid("rank")
    assert keeper.members({str(stage.folder)}, {rank.pid}, spared=(rank.pid,)) == set()
    assert keeper.members(set(), {os.getsid(0)}, spared=()).isdisjoint({os.getpid()})


@pytest.mark.parametrize(("own", "theirs", "is_ours"), [("7", "7", True), ("7", "8", False), ("7", "", False)])
def test_a_job_that_a_rank_sent_to_slurm_is_none_of_ours(stage: Stage, own: str, theirs: str, is_ours: bool) -> None:
    """It carries the mark, for sbatch passes the environment on, but has a number of its own."""
    more = {"SLURM_JOB_ID": theirs} if theirs else {}
    rank = stage.start(note("rank") + ASLEEP, **more)
    stage.pid("rank")
    asking = (
        "import sys; sys.path.insert(0, sys.argv[1]); from train.launch import keeper; "
        "print(sorted(keeper.members({sys.argv[2]}, set())))"
    )
    root = Path(keeper.__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", asking, str(root), str(stage.folder)],
        env=clean_environment(SLURM_JOB_ID=own), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert found.strip() == str([rank.pid] if is_ours else [])


def test_a_name_with_brackets_and_blanks_is_read(stage: Stage, tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([program, "60"], start_new_session=True)
    stage.started.append(process)
    wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith("a)"))
    told = keeper.look_at(process.pid)
    assert told is not None
    assert (told.pid, told.parent, told.session) == (process.pid, os.getpid(), process.pid)
    assert keeper.look_at(2**22 + 1) is None


def test_zombies_are_nobody(stage: Stage) -> None:
    rank = stage.start("sys.exit()\n")
    wait_for(lambda: (told := keeper.look_at(rank.pid)) is not None and told.state == "Z")
    assert rank.pid not in keeper.processes()
    assert keeper.members(set(), {rank.pid}) == set()


def test_what_does_not_die_is_told_at_the_deadline() -> None:
    began_s = time.monotonic()
    assert keeper.end_all(lambda: {2**22 + 1}, deadline_s=0.3) == {2**22 + 1}
    assert time.monotonic() - began_s < 2


def test_what_is_forked_while_we_look_is_found_by_looking_twice(stage: Stage) -> None:
    answers: list[set[int]] = [set(), {2**22 + 1}, set(), set(), set()]
    assert keeper.end_all(lambda: answers.pop(0)) == set()
    assert answers == [set()]


# The keeper as a process.


class Keeper:
    """A keeper whose agent this test is."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._folders: set[str] = set()
        self._sessions: set[int] = set()
        reading, self.pipe = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(reading), str(os.getpid()), str(began())],
            pass_fds=[reading], start_new_session=True,
        )  # fmt: skip
        os.close(reading)

    def say(self, *lines: str) -> None:
        told = [line.partition(" ") for line in lines]
        self._folders |= {rest for word, _, rest in told if word == "start"}
        self._sessions |= {int(rest) for word, _, rest in told if word == "session"}
        os.write(self.pipe, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))

    def vanish(self) -> None:
        self.stage.ours(keeper.members(self._folders, self._sessions))  # before it kills them
        os.close(self.pipe)
        self.process.wait(15)


def test_when_the_agent_vanishes_all_of_its_start_ends_and_its_folder_goes(stage: Stage) -> None:
    guard = Keeper(stage)
    forks = [FORKS[kind].replace("/left'", f"/left{index}'") for index, kind in enumerate(list(FORKS)[3:])]
    ranks = [stage.start(note(f"rank{index}") + fork + ASLEEP) for index, fork in enumerate(forks)]
    stage.pid("rank0"), stage.pid("rank1")
    (stage.folder / "rank0.page").touch()
    guard.say(f"start {stage.folder}", *(f"session {rank.pid}" for rank in ranks))
    left = [stage.pid("left0"), stage.pid("left1")]
    guard.vanish()
    assert [rank.wait(1) for rank in ranks] == [-9, -9]
    assert not any(is_running(pid) for pid in left)
    assert not stage.folder.exists()


def test_after_a_farewell_it_touches_nothing(stage: Stage) -> None:
    guard = Keeper(stage)
    rank = stage.start(note("rank") + ASLEEP)
    stage.pid("rank")
    guard.say(f"start {stage.folder}", f"session {rank.pid}", "farewell")
    guard.vanish()
    assert rank.poll() is None
    assert stage.folder.exists()


def test_a_start_that_is_over_is_not_ended_again(stage: Stage) -> None:
    """Process ids come again: what has a rank's old one may be somebody else."""
    guard = Keeper(stage)
    rank = stage.start(note("rank") + ASLEEP)
    stage.pid("rank")
    guard.say(f"start {stage.folder}", f"session {rank.pid}", "over")
    guard.vanish()
    assert rank.poll() is None
    assert not stage.folder.exists()


def ignores(pid: int, number: int) -> bool:
    """Whether a process has come so far as to ignore a signal (SigIgn in proc(5))."""
    mask = re.search(r"^SigIgn:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def test_no_signal_that_ends_the_agent_ends_its_keeper(stage: Stage) -> None:
    guard = Keeper(stage)
    rank = stage.start(note("rank") + ASLEEP)
    stage.pid("rank")
    guard.say(f"start {stage.folder}", f"session {rank.pid}")
    wait_for(lambda: ignores(guard.process.pid, signal.SIGTSTP))  # the last that it learns to ignore
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        guard.process.send_signal(number)
    time.sleep(0.1)
    assert guard.process.poll() is None
    assert os.getsid(guard.process.pid) == guard.process.pid
    guard.vanish()
    assert guard.process.returncode == 0
    assert rank.wait(1) == -9


def test_a_folder_with_any_name_is_removed(stage: Stage) -> None:
    odd = stage.folder.parent / os.fsdecode(b"muster \xff 'odd\"")
    odd.mkdir()
    guard = Keeper(stage)
    rank = stage.start(note("rank") + ASLEEP, **{STATUS_PAGE: str(odd / "rank0.page")})
    stage.pid("rank")
    guard.say(f"start {odd}")
    guard.vanish()
    assert rank.wait(1) == -9
    assert not odd.exists()


def test_it_starts_fast_and_needs_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", keeper.__file__, "0", "1", "0"],
        input="farewell\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "signal" in loaded
    assert not {"re", "typing", "shutil", "pathlib", "subprocess", "asyncio"} & loaded
