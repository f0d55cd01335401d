"""On a host: the folders of launches, and the agent of one of them.

Each launch has a folder, `launch.json` in it, and beside that:
  lock       held by the agent for as long as it lives, whatever becomes of everything else
  lease      touched by whoever watches; `stop WHO` or `kill WHO` in it is an order (train/launch/afar.py)
  secret     what agents prove their membership with, until the agent has it: a second or two
  environment  more variables, until the container or unit has them
  console    what the agent and its ranks say
  heartbeat  how far it is, and which run folder it writes
  end.json   how it ended, once somebody has looked
Needs Python 3.9 and nothing beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM_MB = 1000
BEGIN_S = 20
"""In which an agent that nobody but itself looks after has taken its lock, or never will."""
# The secret is read here, and its file goes, before anything of ours is loaded: the agent gets it by a pipe. Whatever
# ends in between, a secret that lies about is removed by the next launch.
_BECOME = """unset word
[ ! -e "$folder/secret" ] || { read -r word <"$folder/secret"; rm -f "$folder/secret"; }
exec "$@" <<END
$word
END
"""
# The agent takes the lock (whoever looks whether it is held has it for a moment) and the console, and becomes what it
# is: nothing stands between it and its container's init.
TRAMPOLINE = (
    'exec 9<"$1/lock" && flock --timeout 10 9 || exit 3; folder=$1; shift; '
    'echo "what is said goes to $folder/console"; exec >>"$folder/console" 2>&1\n' + _BECOME
)
# Where neither a container's engine nor systemd tells how it ended, the one that waits for it writes that down.
IN_SESSION = (
    'exec 9<"$1/lock" && flock --timeout 10 9 || exit 3; folder=$1; begin=$2; shift 2; '
    'sh -c "$begin" "$folder" "$@" >>"$folder/console" 2>&1; echo "exited $?" >"$folder/exit"'
)
_BEGIN = 'folder=$0; echo "$$" >"$folder/pid"\n' + _BECOME
PASSING = ("secret", "environment")
"""Files that nobody needs once the agent has said a word."""
LONGEST_LINE = 60_000
"""In bytes; a longer one Docker does not take from a file."""


class RefusalError(Exception):
    """It cannot be, and why."""


def run(*command: str, check: bool = True, timeout_s: float = 60, more: dict[str, str] | None = None) -> str:
    """What a command says, its errors too; `more` are variables for it. Raises RefusalError where it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - words of ours, no shell
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace", timeout=timeout_s, check=False, env={**os.environ, **(more or {})},
        )  # fmt: skip
    except FileNotFoundError:
        raise RefusalError(f"{command[0]} is not there: run provision.yml") from None
    except subprocess.TimeoutExpired:
        raise RefusalError(f"{' '.join(command[:3])} has not answered for {timeout_s:g} s") from None
    if check and done.returncode:
        raise RefusalError(f"{' '.join(command[:2])}: {done.stdout.strip()[-600:]}")
    return done.stdout.strip()


def load(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file; empty where there is none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def python_of(given: dict[str, Any]) -> pathlib.Path:
    """The Python that jobs without containers run with."""
    return pathlib.Path(given.get("python") or f"{given['home']}/venv/bin/python")


def variables(given: dict[str, Any]) -> dict[str, str]:
    """More variables for the agent, as texts."""
    return {name: str(value) for name, value in given["environment"].items()}


def in_quotes(value: str) -> str:
    """As systemd's files of variables have it; lines may end within."""
    return '"' + "".join("\\" + letter if letter in '"\\`$' else letter for letter in value) + '"'


def is_running(folder: pathlib.Path) -> bool:
    """Whether the agent lives: its lock is let go by the kernel when it ends, however."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lines_of(path: pathlib.Path, count: int) -> list[str]:
    """The last lines of a text that say something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 14)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def launches(base: pathlib.Path) -> list[dict[str, Any]]:
    """All launches that the host knows, newest first."""
    found = []
    for folder in sorted(base.glob("*-*-*"), reverse=True):
        about, heartbeat = load(folder / "launch.json"), load(folder / "heartbeat")
        if not about:
            continue
        run_folder = heartbeat.get("run")
        found.append(
            {
                **about, **heartbeat, "running": is_running(folder),
                "age_s": round(time.time() - heartbeat["time"], 1) if "time" in heartbeat else None,
                "run_id": pathlib.PurePath(run_folder).name if run_folder else None,
                "last_line": "".join(lines_of(folder / "console", 1))[-300:],
                "exit_code": load(folder / "end.json").get("exit_code"),
            }
        )  # fmt: skip
    return found


@contextlib.contextmanager
def alone(base: pathlib.Path, patience_s: float = 120) -> Iterator[None]:
    """One at a time on this host."""
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (base / ".lock").open("a") as file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RefusalError(f"another launch has been starting here for {patience_s:g} s") from None
                time.sleep(0.05)
        yield


class Agent:
    """The agent of one launch on this host."""

    def __init__(self, base: pathlib.Path, launch: str) -> None:
        self.folder, self.code = base / launch, base / "code" / launch
        self.name = f"muster-{launch}"
        self.is_begun = False
        self._is_in(load(self.folder / "launch.json").get("runtime"))

    def _is_in(self, runtime: str | None) -> None:
        """Where it lives: a container, a unit of systemd, or, where systemd is not ours, a session of its own."""
        self.in_container = runtime != "venv"
        self.in_unit = runtime == "venv" and os.geteuid() == 0 and pathlib.Path("/run/systemd/system").is_dir()

    def start(self, given: dict[str, Any]) -> None:
        """Start it, detached."""
        self._is_in(given["runtime"])
        self._write_folder(given)
        python = "python" if self.in_container else str(python_of(given))
        more = ["--lease-file", str(self.folder / "lease"), "--runs-dir", given["runs"]]
        more += ["--secret-stdin"] if given["secret"] else []
        ours = "{files}/"  # of a recipe of the user's own; another word of theirs stays as it is
        command = [str(self.folder / word[len(ours) :]) if word.startswith(ours) else word for word in given["command"]]
        words = [python, "-m", "train", "node", *given["arguments"], *more, "--", *command]
        if not self.in_container and not self.in_unit:
            self._start_session(given, words)
            return
        host, passed_on = self._docker(given) if self.in_container else (self._systemd(given), {})
        self.is_begun = True
        words = ["sh", "-c", TRAMPOLINE, "sh", str(self.folder), *words]
        # systemd puts variables of its own in the place of ${NAME}, and $ in that of $$.
        run(*host, *(word.replace("$", "$$") if self.in_unit else word for word in words), more=passed_on)

    def inspect(self, given: dict[str, Any], wait_s: float) -> str:
        """What `python -m train preflight` says where an agent would run: its image, user, limits and folders."""
        self._is_in(given["runtime"])
        self._write_folder(given)
        python = "python" if self.in_container else str(python_of(given))
        secret = ["--secret-file", str(self.folder / "secret")]
        words = [python, "-m", "train", "preflight", *given["arguments"], "--runs-dir", given["runs"], *secret]
        try:
            if self.in_container:
                host, more = self._docker(given)
                host[host.index("--detach")] = "--rm"
            elif self.in_unit:
                host, more = self._systemd(given), {}
                host[1:1] = ["--pipe", "--wait"]
                words = [word.replace("$", "$$") for word in words]
            else:
                host, more = [], {"PYTHONPATH": given["home"], **self._own_variables(given), **variables(given)}
            return run(*host, *words, check=False, timeout_s=wait_s, more=more)
        finally:
            if self.in_container:
                run("docker", "rm", "--force", "--volumes", self.name, check=False)
            elif self.in_unit:
                run("systemctl", "kill", "--signal", "SIGKILL", f"{self.name}.service", check=False)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_session(self, given: dict[str, Any], words: list[str]) -> None:
        own = {"PYTHONPATH": given["home"], "PYTHONUNBUFFERED": "1", **self._own_variables(given)}
        more = {**own, **variables(given)}
        subprocess.Popen(  # noqa: S603 - words of ours, and none of a shell's
            ["sh", "-c", IN_SESSION, "sh", str(self.folder), _BEGIN, *words],  # noqa: S607
            cwd=given["code"] or given["home"], env={**os.environ, **more}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.is_begun = True

    def _write_folder(self, given: dict[str, Any]) -> None:
        uid, (watcher, group) = given["uid"], given["watcher"]
        gid = given.get("gid", uid)
        self.folder.mkdir(mode=0o750)
        os.chown(self.folder, uid, group)
        about = {**given["about"], "id": given["launch"], "by": given["by"], "runtime": given["runtime"]}
        texts = {
            "launch.json": json.dumps({**about, "since": time.time()}) + "\n", "lock": "", "lease": "",
            **given["files"],
        }  # fmt: skip
        if given["secret"]:
            texts["secret"] = given["secret"] + "\n"
        for name, text in texts.items():
            self._write(name, text, *((watcher, group) if name == "lease" else (uid, gid)))

    def _write(self, name: str, text: str, uid: int = -1, gid: int = -1) -> str:
        """A new file in the launch's folder; its path. Whoever else is on the host sees none of what is passing."""
        mode = 0o600 if name in PASSING else 0o644
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, mode)
            os.fchown(descriptor, uid, gid)
            file.write(text)
        return str(self.folder / name)

    def _own_variables(self, given: dict[str, Any]) -> dict[str, str]:
        """Those that a site does not set itself."""
        own = {"MUSTER_RUNS_DIR": given["runs"], "MUSTER_HEARTBEAT_FILE": str(self.folder / "heartbeat")}
        return {name: value for name, value in own.items() if name not in given["environment"]}

    def _docker(self, given: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        """The client's words, and variables that it is to pass on by name."""
        words = [
            "docker", "run", "--detach", "--pull", "never", "--name", self.name,
            "--label", f"muster.launch={given['launch']}", "--network", "host",
            "--user", f"{given['uid']}:{given.get('gid', given['uid'])}", "--read-only", "--tmpfs", "/tmp",  # noqa: S108
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--stop-timeout", "60",
        ]  # fmt: skip
        if given["gpus"]:
            words += ["--gpus", str(given["gpus"]), "--ipc", "host"]
            words += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
        else:
            words += ["--shm-size", f"{SHM_MB}m"]
        mounts = [f"{path}:{path}" for path in (given["runs"], str(self.folder))]
        if given["code"]:
            mounts.append(f"{given['code']}:{given['code']}:ro")
            words += ["--workdir", given["code"]]
        for mount in [*mounts, *given["mounts"]]:
            words += ["--volume", mount]
        checks = {"MUSTER_GPUS": given["gpus"], "MUSTER_SHM_MB": SHM_MB}
        for name, value in {**checks, **self._own_variables(given)}.items():
            words += ["--env", f"{name}={value}"]
        told = variables(given)
        # A file of Docker's has a variable in each line, whatever its length.
        passed_on = {n: v for n, v in told.items() if {*v} & {*"\r\n"} or len(v.encode()) > LONGEST_LINE}
        lines = "".join(f"{name}={value}\n" for name, value in told.items() if name not in passed_on)
        words += ["--env-file", self._write("environment", lines)] if lines else []
        for name in passed_on:
            words += ["--env", name]
        return [*words, *given["options"], given["image"]], passed_on

    def _systemd(self, given: dict[str, Any]) -> list[str]:
        uid = str(given["uid"])
        words = ["systemd-run", "--quiet", "--collect", "--unit", self.name, "--uid", uid, "--gid", uid]
        properties = {
            "KillMode": "control-group", "TimeoutStopSec": "60", "NoNewPrivileges": "yes", "LimitMEMLOCK": "infinity",
            "LimitNOFILE": "1048576", "WorkingDirectory": given["code"] or given["home"],
            "ExecStopPost": f"+/bin/sh -c 'echo \"$EXIT_CODE $EXIT_STATUS\" >{self.folder}/exit'",
        }  # fmt: skip
        words += [f"--property={name}={value}" for name, value in properties.items()]
        told = variables(given)
        if told:
            lines = "".join(f"{name}={in_quotes(value)}\n" for name, value in told.items())
            file = self._write("environment", lines)
            words.append(f"--property=EnvironmentFile=-{file}")  # -: it is gone when ExecStopPost comes
        own = {"PYTHONPATH": given["home"], "PYTHONUNBUFFERED": "1", **self._own_variables(given)}
        return [*words, *(f"--setenv={name}={value}" for name, value in own.items()), "--"]

    def wait_for_a_word(self, wait_s: float) -> None:
        """Until it has said something: by then it has what is passing, which goes. Raises RefusalError."""
        deadline = time.monotonic() + wait_s
        try:
            while not lines_of(self.folder / "console", 1):
                if not self._is_up():
                    raise RefusalError("the agent ended at once: " + (self.last_words() or "without a word"))
                if time.monotonic() > deadline:
                    raise RefusalError(f"the agent has not said a word for {wait_s:g} s")
                time.sleep(0.1)
        finally:
            self.forget()

    def forget(self) -> None:
        """What is passing goes."""
        for name in PASSING:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()

    def _is_up(self) -> bool:
        """Whether its container or unit runs."""
        if self.in_container:
            return run("docker", "inspect", "--format", "{{.State.Running}}", self.name, check=False) == "true"
        if not self.in_unit:
            begun_s = time.time() - (self.folder / "launch.json").stat().st_mtime
            return is_running(self.folder) or (begun_s < BEGIN_S and not (self.folder / "exit").exists())
        state = run("systemctl", "show", "--property", "ActiveState", "--value", f"{self.name}.service", check=False)
        return state in ("active", "activating", "deactivating", "reloading")

    def last_words(self) -> str:
        """What it said last; where it never came so far, what its container did."""
        said = lines_of(self.folder / "console", 12)
        if not said and self.in_container:
            said = run("docker", "logs", "--tail", "5", self.name, check=False).splitlines()
        return " ".join(said)[-600:]

    def wait(self, wait_s: float) -> bool:
        """Whether it ended by itself in time."""
        deadline = time.monotonic() + wait_s
        while is_running(self.folder) or self._is_up():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def kill(self) -> None:
        """End it at once, with all that it started. Raises RefusalError where it does not die."""
        if self.in_container:
            run("docker", "kill", self.name, check=False)
        elif not self.in_unit:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int("".join(lines_of(self.folder / "pid", 1))), signal.SIGKILL)
        else:
            run("systemctl", "kill", "--signal", "SIGKILL", f"{self.name}.service", check=False)
        if not self.wait(15):
            raise RefusalError(f"{self.name} cannot be killed (state D?)")

    def conclude(self) -> dict[str, Any]:
        """How it ended; whoever asks first writes it down and tidies up."""
        file = self.folder / "end.json"
        self.forget()
        if not file.exists():
            heartbeat = load(self.folder / "heartbeat")
            end = {
                "exit_code": self._exit_code(), "run": heartbeat.get("run"), "start_id": heartbeat.get("start_id"),
                "step": heartbeat.get("step"), "said": lines_of(self.folder / "console", 40),
                "last_words": self.last_words(),
            }  # fmt: skip
            if self.in_container:
                run("docker", "rm", "--force", "--volumes", self.name, check=False)
            if not (end["run"] or end["start_id"]):  # no rank has started: its code is of no use to anybody
                shutil.rmtree(self.code, ignore_errors=True)
            file.write_text(json.dumps(end) + "\n", encoding="utf-8")
        return load(file)

    def _exit_code(self) -> int | None:
        if self.in_container:
            code = run("docker", "inspect", "--format", "{{.State.ExitCode}}", self.name, check=False)
        else:
            how, _, code = "".join(lines_of(self.folder / "exit", 1)).partition(" ")
            if how not in ("exited", ""):  # a signal, by name
                return 137
        return int(code) if code.isdigit() else None
