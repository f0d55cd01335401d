"""A job on hosts with sshd and nothing else of ours: looked at, started, watched to its end, its results brought.

What is done on a host is what Ansible does there (ansible/roles/job), as the user who logs in. `fabfile.py` calls this.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from train.errors import UsageError
from train.launch import ending, fitness, request
from train.launch.collect import bring
from train.launch.pack import pack
from train.launch.polling import Polling
from train.launch.ssh_code import push_archive, push_code
from train.launch.ssh_host import SshHost, who
from train.launch.ssh_site import FAB, Site, own_words, silent
from train.launch.ssh_words import goes_on, option, outcomes, refused
from train.launch.watch import Notes
from train.seam import Exit

LEASE_S = 15.0
"""How long a job goes on when nobody watches it any more, unless it was detached."""
UNREACHABLE_S = 10.0
"""A host that does not answer for so long is given up; the job stops."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    site: Site, asked: Mapping[str, Any], check_config: request.CheckConfig, results: Path,
    say: Callable[[str], None], began_s: float,
) -> int:  # fmt: skip
    """From what is asked for to the job's exit code; its last line tells how it ended."""
    problems = []
    told = request.launch(asked, [*site.hosts], site.variables, who(), check_config, LEASE_S, FAB)
    archive = b""
    if asked.get("code"):
        try:
            archive = _packed(Path(str(asked["code"])).expanduser())
        except UsageError as error:
            problems += error.problems
    problems += told["problems"]
    if problems:
        return refused(say, [option(problem) for problem in problems], Exit.USAGE)
    with tempfile.TemporaryDirectory(prefix="muster-launch-") as folder:
        notes = Notes(Path(folder) / "notes")
        notes.write("time.enter", at_s=began_s)
        return _Launch(site, told, archive, asked, results, notes, say).run()


def dry_run(site: Site, asked: Mapping[str, Any], check_config: request.CheckConfig) -> str:
    """The plan, and each host's exact command. Raises UsageError."""
    usual = {"runtime": "venv", "device": "cpu", "share": "", "detach": "", "checkpoints": ""}
    told = request.launch({**usual, **asked}, [*site.hosts], site.variables, who(), check_config, LEASE_S, FAB)
    if told["problems"]:
        raise UsageError([option(problem) for problem in told["problems"]])
    given = site.given()
    rows = [told["table"]]
    for name, mine in told["hosts"].items():
        more = ["--lease-file", f"{given['folder']}/{told['id']}/lease", "--runs-dir", given["runs"]]
        words = [given["pythons"][0], "-m", "train", "node", *mine["arguments"], *more, "--", *told["command"]]
        rows.append(f"\n# on {name}, with PYTHONPATH={given['home']}\n{' '.join(map(_quoted, words))}")
    return "\n".join(rows)


def _quoted(word: str) -> str:
    """For a shell, which is to understand the tilde."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


class _Launch:
    """One launch, from the first look at its hosts."""

    def __init__(
        self, site: Site, told: dict[str, Any], archive: bytes, asked: Mapping[str, Any], results: Path, notes: Notes,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._site, self._told, self._archive, self._asked = site, told, archive, asked
        self._results, self._notes, self._say = results, notes, say
        self._names: list[str] = told["names"]
        self._signalled = 0
        self._is_over = False
        """The job has ended; its results are brought."""

    def run(self) -> int:
        site, told, say = self._site, self._told, self._say
        probes = site.ask("probed", self._names, runtime=told["runtime"])
        fit = {name: probe for name, probe in probes.items() if "gpus" in probe}
        device, problems = request.device_of(told["device"], {n: probe["gpu_files"] for n, probe in fit.items()}, FAB)
        problems += silent(probes) + fitness.unfit(fit, told, device, FAB)
        if problems:
            return refused(say, problems, Exit.PREFLIGHT)
        say("\n".join([*(f"muster: {words}" for words in told["left_out"]), told["table"]]))
        try:
            sent = push_code(site, probes) if told["runtime"] == "venv" else []
            if self._archive:
                push_archive(site, self._archive, {name: self._code_of(probes[name]) for name in self._names})
        except UsageError as error:
            return refused(say, error.problems, Exit.PREFLIGHT)
        if sent:
            say(f"muster: code sent to {', '.join(sent)}")
        self._notes.write("time.connect")
        with self._signals():
            started = self._start(device, probes)
            is_up = all(told_by.get("is_up") for told_by in started.values())
            if told["detach"] and is_up and self._notes.read("stop") is None:
                say(goes_on(told))
                return int(Exit.FINISHED)
            self._notes.write("time.container")
            watched = self._watch(probes) if is_up else {}
            return self._end(started, watched, probes)

    def _code_of(self, probe: Mapping[str, Any]) -> str:
        return f"{probe['paths']['folder']}/code/{self._told['id']}" if self._archive else ""

    def _start(self, device: str, probes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        told, secret = self._told, secrets.token_urlsafe(32)
        command = told["command"] + (["--runtime.device", device] if told["ours"] else [])

        def start(name: str, host: SshHost) -> dict[str, Any]:
            mine = told["hosts"][name]
            about = {
                "grace_s": told["grace_s"], "world_size": told["world_size"], "host": name, "slots": mine["slots"],
                "node_rank": mine["node_rank"], "names": self._names, "command": told["command"],
            }  # fmt: skip
            given = self._site.given(
                launch=told["id"], by=told["by"], share=told["share"], runtime=told["runtime"], wait_s=60,
                arguments=mine["arguments"], command=command, about=about, files=told["files"], secret=secret,
                gpus=mine["slots"] if device == "cuda" else 0, environment=dict(self._asked.get("env") or {}),
                mounts=[], options=[], code=self._code_of(probes[name]),
            )  # fmt: skip
            answer = own_words(host.ask("started", given, 90.0))
            if answer.get("failed") or answer.get("unreachable"):
                self._notes.write("stop", f"the launcher, for {name} could not start its agent")
                answer.setdefault("msg", answer.get("unreachable_why"))
            return answer

        return self._site.each(start, self._names)

    def _watch(self, probes: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
        def watch(name: str, host: SshHost) -> tuple[str, str]:
            folder = PurePosixPath(probes[name]["paths"]["folder"]) / self._told["id"]
            polling = Polling(
                folder, name, self._names, self._told["grace_s"], self._notes, self._say, ours=self._told["ours"],
                unreachable_s=UNREACHABLE_S,
            )  # fmt: skip
            return polling.run(host.poll, lambda: True)

        return self._site.each(watch, self._names, len(self._names))

    def _end(
        self, started: Mapping[str, Mapping[str, Any]], watched: Mapping[str, tuple[str, str]],
        probes: Mapping[str, Mapping[str, Any]],
    ) -> int:  # fmt: skip
        def end(name: str, host: SshHost) -> dict[str, Any]:
            how = watched.get(name, ("", ""))[0]
            if how == "lost":
                return {"lost": True}
            wait_s = 15 if how == "ended" else 0
            given = self._site.given(launch=self._told["id"], wait_s=wait_s, runtime=self._told["runtime"])
            told = host.ask("ended", given, wait_s + 60.0)
            return {**told, "lost": bool(told.get("unreachable"))}

        ended = self._site.each(end, self._names)
        hosts = {}
        for name in self._names:
            is_refused = not started[name].get("is_up")
            hosts[name] = {**ended[name], "failed": is_refused}
            if is_refused:
                hosts[name]["msg"] = started[name].get("msg") or "its agent could not be started"
        verdict = ending.verdict(self._names, hosts, FAB)
        brought = self._bring(verdict["host"], ended, probes)
        if verdict["exit_code"] not in (Exit.FINISHED, Exit.STOPPED_SAVED) and len(self._names) > 1:
            self._say(outcomes(self._names, hosts, watched))
        self._say(ending.last_words(verdict, self._names, brought))
        return int(verdict["exit_code"])

    def _bring(
        self, host: str, ended: Mapping[str, Mapping[str, Any]], probes: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        having = [name for name in self._names if ended[name].get("run")]
        label = {name: f"node{self._told['hosts'][name]['node_rank']}-{name}" for name in having}
        checkpoints = request.Asked(self._asked).flag("checkpoints")

        def fetch(name: str, one: SshHost) -> dict[str, Any]:
            launch_folder = f"{probes[name]['paths']['folder']}/{self._told['id']}"
            came = bring(
                one.read, ended[name]["run"], launch_folder, self._results, label[name], whole=name == host,
                checkpoints=checkpoints,
            )  # fmt: skip
            return {"dest": str(came.dest)}

        lost = {name: {"msg": "it cannot be reached"} for name in self._names if ended[name].get("lost")}
        before, self._is_over = self._signalled, True
        came = self._site.each(fetch, having, is_wanted=lambda: self._signalled == before)
        if self._signalled > before:
            self._say(f"muster: the rest is still there: fab collect --launch {self._told['id']}")
        return {**{name: {} for name in self._names}, **lost, **came}

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and the like: the first saves and stops the job everywhere, the second ends it at once."""

        def interrupted(number: int, frame: object) -> None:
            if number == signal.SIGHUP:  # the terminal is gone; whoever wrote to it would fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for descriptor in (1, 2):
                    os.dup2(nowhere, descriptor)
            self._signalled += 1
            asked = self._signalled
            name = "Ctrl-C" if number == signal.SIGINT else f"{signal.Signals(number).name} at the launcher"
            if self._is_over:
                os.write(2, b"\nmuster: leaving\n")
                return
            if asked == 1:
                self._notes.write("stop", name)
            elif asked == 2:
                self._notes.write("kill", f"a second {name}")
            else:
                raise KeyboardInterrupt
            say = ("", "stopping the job; again: ends it at once, unsaved", "ending the job at once")
            os.write(2, f"\nmuster: {say[asked]}\n".encode())

        before = {number: signal.signal(number, interrupted) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _packed(folder: Path) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "code.tgz"
        pack(folder, archive)
        return archive.read_bytes()
