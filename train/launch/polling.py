"""Watching a host's agent from another machine, by whatever runs a command there: one short command, again and again.

What is to be decided is in watch.py; here is what is asked, and what is shown of the answers.
"""

from __future__ import annotations

import base64
import json
import queue
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from train.launch.watch import UNREACHABLE_S, Notes, Watch

EACH_S, AT_FIRST_S, MOST_S, HOSTS_A_SECOND = 1.0, 0.4, 8.0, 16
SILENT_S = 4.0
"""After which that is said."""
PARTS = ("enter", "connect", "container", "join", "first step")
CHUNK_BYTES, MOST_BYTES = 1 << 16, 1 << 20
# The order, whether the agent lives (then it holds the lock), its heartbeat, its console's news.
_QUESTION = """cd {folder} || exit 9
{order}
if flock --shared --nonblock lock true; then echo ended; else echo alive; fi
size=$(stat -c %s console 2>/dev/null || echo 0); echo "$size"
head -c 4000 heartbeat 2>/dev/null | base64 -w 0; echo
[ {at} -ge "$size" ] || tail -c +$(({at} + 1)) console | head -c {most} | base64 -w 0"""


class Answered(NamedTuple):
    """What became of a command on a host."""

    code: int
    stdout: str
    stderr: str


Ask = Callable[[str], Answered]
"""Runs a command on the host; may raise whatever it likes where that cannot be."""


class Silence(Exception):
    """The host did not answer, and why."""


class Polling:
    """The watching of one host's agent, to its end."""

    def __init__(
        self, folder: PurePosixPath, host: str, hosts: Sequence[str], grace_s: float, notes: Notes,
        say: Callable[[str], None], *, ours: bool, follow: bool = False, unreachable_s: float = UNREACHABLE_S,
    ) -> None:  # fmt: skip
        """
        Args:
            folder: of the launch, on the host.
            host: whose agent it is.
            hosts: all hosts, in rank order; the first one's console is shown.
            grace_s: how long agents may take to save.
            notes: shared by the watchers of all hosts.
            say: shows a line.
            ours: steps are told.
            follow: only look on.
            unreachable_s: a host that does not answer for so long is given up.
        """
        self._folder, self._hosts, self._say = folder, hosts, say
        self._is_first, self._is_ours, self._follow = host == hosts[0], ours, follow
        self._watch = Watch(host, hosts, notes, grace_s, unreachable_s, only_looks=follow)
        begun = {name: notes.read(f"time.{name}") for name in PARTS}
        self.times = {name: note.at_s for name, note in begun.items() if note}
        self._shown, self._rest, self._step = 0, b"", -1

    def run(self, ask: Ask, is_wanted: Callable[[], bool]) -> tuple[str, str]:
        """Until the agent has ended, or its host is lost: `ended`, `overdue`, `lost` or `unwanted`, and why."""
        try:
            return self._run(ask, is_wanted)
        finally:
            self._show(b"\n" if self._rest else b"")

    def _run(self, ask: Ask, is_wanted: Callable[[], bool]) -> tuple[str, str]:
        questions: queue.Queue[str] = queue.Queue()
        answers: queue.Queue[dict[str, Any] | Silence] = queue.Queue()
        # In a thread: where the line is cut a poll may hang for long, and the others' end must be seen all the same.
        threading.Thread(target=self._ask, args=(ask, questions, answers), daemon=True).start()
        why = ""
        while is_wanted():
            questions.put(self._watch.order())
            asked_s = time.monotonic()
            while True:
                try:
                    answer = answers.get(timeout=0.5)
                    break
                except queue.Empty:
                    if time.monotonic() - asked_s > SILENT_S:
                        why = self._told(why, "it is silent")
                    if how := self._watch.unheard(why or "it is silent"):
                        return how, why or "it is silent"
            if isinstance(answer, Silence):
                why = self._told(why, str(answer))
                if how := self._watch.unheard(why):
                    return how, why
                time.sleep(EACH_S)
                continue
            why = ""
            self._take(answer)
            is_behind = self._is_first and answer["size"] > self._shown
            if how := self._watch.heard(alive=answer["alive"] or is_behind):
                return how, ""
            if not is_behind:
                time.sleep(self._pause_s())
        return "unwanted", ""

    def _told(self, before: str, why: str) -> str:
        """Why there is no answer; said when it begins."""
        if not before:
            self._say(f"muster: {self._watch.host} does not answer: {why}")
        return why

    def _pause_s(self) -> float:
        """Often until the job is on its way, for that is measured; less often where many hosts are asked."""
        is_starting = "join" not in self.times or (self._is_ours and self._step < 1)
        if self._is_first:
            return AT_FIRST_S if is_starting else EACH_S
        return min(MOST_S, max(EACH_S, len(self._hosts) / HOSTS_A_SECOND))

    def _ask(self, ask: Ask, questions: queue.Queue[str], answers: queue.Queue[dict[str, Any] | Silence]) -> None:
        while True:
            order = questions.get()
            try:
                answers.put(self._parsed(ask(self._question(order))))
            except Exception as error:  # whatever it is, the host was not heard
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                answers.put(Silence(lines[-1][-300:] if lines else type(error).__name__))

    def _question(self, order: str) -> str:
        act = f"printf '%s\\n' {shlex.quote(order)} >lease" if order else ("" if self._follow else "touch lease")
        at, most = (self._shown, CHUNK_BYTES) if self._is_first else (1 << 60, 0)
        return _QUESTION.format(folder=shlex.quote(str(self._folder)), order=act, at=at, most=most)

    @staticmethod
    def _parsed(answer: Answered) -> dict[str, Any]:
        lines = answer.stdout.split("\n")
        if answer.code or len(lines) < 3:
            raise Silence((answer.stderr or answer.stdout).strip() or f"exit code {answer.code}")
        try:
            heartbeat = json.loads(base64.b64decode(lines[2]) or b"{}")
        except ValueError:
            heartbeat = {}
        new = base64.b64decode("".join(lines[3:]))
        return {"alive": lines[0] == "alive", "size": int(lines[1]), "heartbeat": heartbeat, "new": new}

    def _take(self, answer: dict[str, Any]) -> None:
        """What a poll brought."""
        heartbeat = answer["heartbeat"]
        if not self._is_first:
            return
        self._shown += len(answer["new"])
        self._show(answer["new"])
        if answer["size"] - self._shown > MOST_BYTES:
            left_out = answer["size"] - self._shown - CHUNK_BYTES
            self._shown += left_out
            self._rest = b""
            self._say(f"… {left_out >> 20} MB are left out here; the console's file on the host has all …")
        self._step = int(heartbeat.get("step", -1))
        self._reached("join", is_last=not self._is_ours, when=bool(heartbeat.get("start_id")))
        self._reached("first step", is_last=True, when=self._step >= 1)

    def _reached(self, part: str, *, is_last: bool, when: bool) -> None:
        if when and part not in self.times:
            self.times[part] = time.monotonic()
            if is_last and "container" in self.times:
                self._say(_parts(self.times))

    def _show(self, new: bytes) -> None:
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._say(line.decode("utf-8", "replace"))


def _parts(times: dict[str, float]) -> str:
    """From Enter to the first training step, or the start of ranks that tell no steps, and what took how long."""
    parts = [part for part in PARTS if part in times]
    spans = [f"{part} {times[part] - times[before]:.1f} s" for before, part in pairwise(parts)]
    what = "first training step" if parts[-1] == PARTS[-1] else "ranks are started"
    return f"muster: {what} {times[parts[-1]] - times[parts[0]]:.1f} s after Enter: {', '.join(spans)}"
