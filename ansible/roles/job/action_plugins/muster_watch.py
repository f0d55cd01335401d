"""Watches the agent of a host, as long as it lives: shows what agent 0 says, renews the lease, passes on orders.

Runs on the control machine, in a process for each host. What is to be decided is in train/launch/watch.py.
"""

from __future__ import annotations

import base64
import contextvars
import json
import os
import queue
import shlex
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import ansible.constants as C
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

_ROOT = str(Path(__file__).resolve().parents[4])
sys.path.insert(0, _ROOT)  # until `train` is found: what else lies there must not be taken for packages
import train  # noqa: E402, F401

sys.path.remove(_ROOT)

from train.launch.watch import Notes, Watch  # noqa: E402

EACH_S, AT_FIRST_S, MOST_S, HOSTS_A_SECOND = 1.0, 0.4, 8.0, 16
PARTS = ("enter", "connect", "container", "join", "first step")
CHUNK_BYTES, MOST_BYTES = 1 << 16, 1 << 20
# One short command: the order, whether the agent lives (then it holds the lock), its heartbeat, its console's news.
POLL = """cd {folder} || exit 9
{order}
if flock --shared --nonblock lock true; then echo ended; else echo alive; fi
size=$(stat -c %s console 2>/dev/null || echo 0); echo "$size"
head -c 4000 heartbeat 2>/dev/null | base64 -w 0; echo
[ {at} -ge "$size" ] || tail -c +$(({at} + 1)) console | head -c {most} | base64 -w 0"""


class Silence(Exception):
    """The host did not answer, and why."""


class ActionModule(ActionBase):  # type: ignore[misc]
    """Options: folder, launch, host, hosts (in rank order), grace_s; ours: steps are told; follow: only look on."""

    _shown = 0
    _rest = b""
    _step = -1

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Until the agent has ended, or its host is lost: `ended`, `overdue` or `lost`."""
        super().run(tmp, task_vars)
        given = self._task.args
        self._is_first = given["host"] == given["hosts"][0]
        self._follow, self._is_ours = bool(given.get("follow")), bool(given.get("ours"))
        notes = Notes(Path(C.DEFAULT_LOCAL_TMP) / "muster")
        begun = {name: notes.read(f"time.{name}") for name in PARTS}
        self._times = {name: note.at_s for name, note in begun.items() if note}
        watch = Watch(given["host"], given["hosts"], notes, float(given["grace_s"]))
        if self._connection.transport.endswith("ssh"):
            self._connection.set_option("reconnection_retries", 0)  # a poll that fails is made again anyway
        how, why = self._watch(watch, os.getppid())
        self._show(b"\n" if self._rest else b"")
        return {"changed": not self._follow, "how": how, "lost": how == "lost", "why": why, "times": self._times}

    def _watch(self, watch: Watch, parent: int) -> tuple[str, str]:
        questions: queue.Queue[str] = queue.Queue()
        answers: queue.Queue[dict[str, Any] | Silence] = queue.Queue()
        # In a thread: where the line is cut a poll may hang for long, and the others' end must be seen all the same.
        asking = threading.Thread(
            target=contextvars.copy_context().run, args=(self._ask, questions, answers), daemon=True
        )
        asking.start()
        why = ""
        while os.getppid() == parent:  # without ansible-playbook itself nobody watches: let the lease end
            questions.put("" if self._follow else watch.order())
            while True:
                try:
                    answer = answers.get(timeout=0.5)
                    break
                except queue.Empty:
                    if how := watch.unheard(why or "it does not answer"):
                        return how, why or "it does not answer"
            if isinstance(answer, Silence):
                why = str(answer)
                if how := watch.unheard(why):
                    return how, why
                time.sleep(EACH_S)
                continue
            self._take(answer)
            is_behind = self._is_first and answer["size"] > self._shown
            if how := watch.heard(alive=answer["alive"] or is_behind):
                return how, ""
            if not is_behind:
                time.sleep(self._pause_s())
        raise AnsibleError("ansible-playbook is gone")

    def _pause_s(self) -> float:
        """Often until the job is on its way, for that is measured; less often where many hosts are asked."""
        is_starting = "join" not in self._times or (self._is_ours and self._step < 1)
        if self._is_first:
            return AT_FIRST_S if is_starting else EACH_S
        return min(MOST_S, max(EACH_S, len(self._task.args["hosts"]) / HOSTS_A_SECOND))

    def _ask(self, questions: queue.Queue[str], answers: queue.Queue[dict[str, Any] | Silence]) -> None:
        while True:
            order = questions.get()
            try:
                answers.put(self._poll(order))
            except Exception as error:  # whatever it is, the host was not heard
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                answers.put(Silence(lines[-1][-300:] if lines else type(error).__name__))

    def _poll(self, order: str) -> dict[str, Any]:
        given = self._task.args
        act = f"printf '%s\\n' {shlex.quote(order)} >lease" if order else ("" if self._follow else "touch lease")
        at, most = (self._shown, CHUNK_BYTES) if self._is_first else (1 << 60, 0)
        folder = shlex.quote(str(Path(given["folder"]) / given["launch"]))
        command = POLL.format(folder=folder, order=act, at=at, most=most)
        answer = self._low_level_execute_command(command, sudoable=False)
        lines = answer["stdout"].split("\n")
        if answer["rc"] or len(lines) < 3:
            raise Silence((answer.get("stderr") or answer["stdout"]).strip() or f"exit code {answer['rc']}")
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
            self._display.display(f"… {left_out >> 20} MB are left out here; the console's file on the host has all …")
        self._step = int(heartbeat.get("step", -1))
        self._reached("join", is_last=not self._is_ours, when=bool(heartbeat.get("start_id")))
        self._reached("first step", is_last=True, when=self._step >= 1)

    def _reached(self, part: str, *, is_last: bool, when: bool) -> None:
        if when and part not in self._times:
            self._times[part] = time.monotonic()
            if is_last and "container" in self._times:
                self._display.display(_parts(self._times))

    def _show(self, new: bytes) -> None:
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._display.display(line.decode("utf-8", "replace"))


def _parts(times: dict[str, float]) -> str:
    """From Enter to the first training step, or the start of ranks that tell no steps, and what took how long."""
    parts = [part for part in PARTS if part in times]
    spans = [f"{part} {times[part] - times[before]:.1f} s" for before, part in pairwise(parts)]
    what = "first training step" if parts[-1] == PARTS[-1] else "ranks are started"
    return f"muster: {what} {times[parts[-1]] - times[parts[0]]:.1f} s after Enter: {', '.join(spans)}"
