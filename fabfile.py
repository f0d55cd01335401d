"""`fab launch`: a job on hosts with sshd, and nothing else of ours on them. `fab --list`, `fab --help launch`.

Hosts are `--hosts a,b` (in rank order; a:4 for its number of ranks, me@a for another user), or `--inventory FILE`,
Ansible's own. ~/.ssh/config counts. What is done is in train/launch/ssh.py and beside it.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fabric.executor
import invoke.exceptions
from fabric import task

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train.errors import UsageError
from train.launch import ending, ssh, ssh_later, ssh_preflight, ssh_site
from train.launch.ssh_host import UnreachableError
from train.options import launch_problems
from train.seam import Exit

_BEGAN_S = time.monotonic()
_COMMAND = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
_ABOUT = {
    "hosts": "a,b in rank order; a:4 is a host with 4 ranks, me@a another user's",
    "inventory": "Ansible's YAML, in place of --hosts",
    "nproc": "ranks a host, where it is not said for each (1)",
    "ssh-config": "in place of ~/.ssh/config",
    "home": "folder on the hosts for code, runs and what is known of launches (~/muster)",
    "python": "of the virtual environment there (~/muster/venv/bin/python, else /opt/muster/venv/bin/python)",
    "image": "the container image, for --runtime docker (the inventory's muster_image, else muster:cpu)",
    "launch": "which launch, by its id; else the newest",
    "run-id": "which run",
    "results": "folder here for run folders (runs)",
}


_expand_calls = fabric.executor.Executor.expand_calls


def _expand_without_remainder(self: Any, calls: Any, apply_hosts: bool = True) -> Any:
    """Fabric runs what follows `--` in a shell of each host. Here it is the ranks' command, and `launch` has it."""
    self.core.remainder = ""
    return _expand_calls(self, calls, apply_hosts)


fabric.executor.Executor.expand_calls = _expand_without_remainder


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # nobody reads any more (`| head`): as where the terminal is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if callable(signal.getsignal(signal.SIGHUP)):  # a job is up
            os.kill(os.getpid(), signal.SIGHUP)


def _ends(work: Callable[[], int]) -> None:
    """Exit with its code; what is wrong is said in words."""
    try:
        code = work()
    except UsageError as error:
        _say(ending.refusal(error.problems, Exit.USAGE))
        code = int(Exit.USAGE)
    except (UnreachableError, OSError) as error:
        _say(f"muster: {error}")
        code = int(Exit.PREFLIGHT)
    except KeyboardInterrupt:
        _say("muster: left by Ctrl-C")
        code = int(Exit.STOPPED_UNSAVED)
    raise invoke.exceptions.Exit(code=int(code))


def _only(names: str, **more: str) -> dict[str, str]:
    return {**{name: _ABOUT[name] for name in names.split()}, **more}


_SITE = "hosts inventory nproc ssh-config home python image"


@task(
    help=_only(
        f"{_SITE} run-id results",
        config="a recipe (ddp), or a YAML file of this machine", overrides="for the recipe: '--optim.lr 1e-3'",
        code="a folder of this machine from which a command after -- is started", nodes="the first so many hosts",
        runtime="venv or docker", device="auto, cpu or cuda", env="more variables of ranks: 'A=1 B=2'",
        detach="do not watch: it goes on by itself", share="beside other launches on the same hosts",
        checkpoints="bring them too (yes)", quarantine="leave out the hosts in this file of preflight's",
        preflight="look at all hosts before, as fab preflight does", **{
            "time-limit": "seconds; then it saves and ends", "grace": "seconds to save after a stop request (300)",
            "join-timeout": "seconds for all agents to come (120)", "max-restarts": "after a failure (0)",
            "idle-timeout": "seconds of silence of all ranks that mean a hang",
        },
    )
)  # fmt: skip
def launch(
    c: Any, hosts: str = "", inventory: str = "", nproc: str = "", config: str = "", overrides: str = "",
    code: str = "", nodes: str = "", run_id: str = "", runtime: str = "venv", device: str = "", env: str = "",
    time_limit: str = "", grace: str = "300", join_timeout: str = "120", idle_timeout: str = "",
    max_restarts: str = "", preflight: bool = False, quarantine: str = "", detach: bool = False,
    share: bool = False, checkpoints: bool = True, ssh_config: str = "", home: str = "~/muster", python: str = "",
    image: str = "", results: str = "runs",
) -> None:  # fmt: skip
    """Train on all hosts, and see it through to the end: fab launch --hosts a,b --nproc 4 --config ddp [-- COMMAND]"""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, nproc, ssh_config, home=home, python=python, image=image)
        asked = {
            "config": config, "overrides": overrides, "script": _COMMAND, "code": code, "nodes": nodes,
            "run_id": run_id, "time_limit": time_limit, "grace": grace, "join_timeout": join_timeout,
            "idle_timeout": idle_timeout, "max_restarts": max_restarts, "runtime": runtime,
            "device": device or site.usual("muster_device", "auto"), "share": share, "detach": detach,
            "checkpoints": checkpoints, "env": _variables(env), "quarantine": quarantine,
        }  # fmt: skip
        if preflight:
            words, unfit = ssh_preflight.preflight(site, runtime, str(asked["device"]), without=quarantine)
            _say(words)
            if unfit:
                return unfit
        return ssh.launch(site, asked, launch_problems, Path(results), _say, _BEGAN_S)

    _ends(work)


def _variables(text: str) -> dict[str, str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--env: {text!r} has no end: {error}") from None
    wrong = [word for word in words if not word.partition("=")[0].isidentifier() or "=" not in word]
    if wrong:
        raise UsageError([f"--env: {word!r} must be NAME=value" for word in wrong])
    return dict(word.split("=", 1) for word in words)


@task(
    help=_only(
        _SITE, runtime="venv or docker", device="auto, cpu or cuda (the inventory's muster_device, else auto)",
        floors="what must be there: '--min-shm-mb 1000 --min-mb-per-s 100' (python -m train preflight --help)",
        quarantine="a file; hosts that are not fit are added to it, for launch --quarantine",
    )
)  # fmt: skip
def preflight(
    c: Any, hosts: str = "", inventory: str = "", nproc: str = "", runtime: str = "venv", device: str = "",
    floors: str = "", quarantine: str = "", ssh_config: str = "", home: str = "~/muster", python: str = "",
    image: str = "",
) -> None:  # fmt: skip
    """Are the hosts fit for a job: each one, and all between them. What is wrong with whom, and what mends it."""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, nproc, ssh_config, home=home, python=python, image=image)
        asked = device or site.usual("muster_device", "auto")
        count = len(site.hosts)
        _say(f"muster: looking at {'1 host' if count == 1 else f'{count} hosts, and between them'}")
        words, code = ssh_preflight.preflight(site, runtime, asked, shlex.split(floors), quarantine)
        _say(words)
        return code

    _ends(work)


@task(help=_only("hosts inventory ssh-config home", all="also what has ended"))
def status(
    c: Any, hosts: str = "", inventory: str = "", all: bool = False, ssh_config: str = "", home: str = "~/muster"
) -> None:
    """What runs on these hosts, and how far it is."""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, "", ssh_config, home=home)
        _say("\n".join(ssh_later.status(site, all_of_them=all)))
        return 0

    _ends(work)


@task(
    help=_only(
        "hosts inventory ssh-config home launch run-id", follow="until it ends", rank="of this one, in place of all",
        lines="the last so many (40)",
    )
)  # fmt: skip
def logs(
    c: Any, hosts: str = "", inventory: str = "", launch: str = "", run_id: str = "", follow: bool = False,
    rank: str = "", lines: str = "40", ssh_config: str = "", home: str = "~/muster",
) -> None:  # fmt: skip
    """What a launch says: fab logs --hosts a,b --follow, or --rank 3"""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, "", ssh_config, home=home)
        wrong = [
            f"--{n}: {v!r} must be a number" for n, v in (("rank", rank), ("lines", lines)) if v and not v.isdecimal()
        ]
        if wrong:
            raise UsageError(wrong)
        if follow:
            return ssh_later.follow(site, launch, run_id, _say)
        sys.stdout.write(ssh_later.log_of(site, launch, run_id, int(rank) if rank else None, int(lines or 40)))
        return 0

    _ends(work)


@task(help=_only("hosts inventory ssh-config home launch run-id"))
def stop(
    c: Any, hosts: str = "", inventory: str = "", launch: str = "", run_id: str = "", ssh_config: str = "",
    home: str = "~/muster",
) -> None:  # fmt: skip
    """Save and stop what runs on these hosts, or one launch of it."""

    def work() -> int:
        told = ssh_later.stop(ssh_site.site_of(hosts, inventory, "", ssh_config, home=home), launch, run_id)
        _say("\n".join(told["lines"]))
        return int(Exit.FINISHED if told["is_good"] else Exit.HOST_LOST)

    _ends(work)


@task(help=_only("hosts inventory ssh-config home launch run-id results", checkpoints="bring them too (yes)"))
def collect(
    c: Any, hosts: str = "", inventory: str = "", launch: str = "", run_id: str = "", checkpoints: bool = True,
    ssh_config: str = "", home: str = "~/muster", results: str = "runs",
) -> None:  # fmt: skip
    """Bring a launch's run folder and logs to this machine."""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, "", ssh_config, home=home)
        lines, is_whole = ssh_later.collect(site, launch, run_id, Path(results), checkpoints=checkpoints)
        _say("\n".join(lines))
        return int(Exit.FINISHED if is_whole else Exit.PREFLIGHT)

    _ends(work)


@task(help=_only("hosts inventory ssh-config home", image="send this image of this machine's Docker, in place of code"))
def push(
    c: Any, hosts: str = "", inventory: str = "", image: str = "", ssh_config: str = "", home: str = "~/muster"
) -> None:
    """Send this checkout's code, or an image, to the hosts that do not have it. (launch sends code by itself.)"""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, "", ssh_config, home=home)
        for line in ssh_later.push_image(site, image) if image else ssh_later.push(site):
            _say(f"muster: {line}")
        return 0

    _ends(work)


@task(help=_only(f"{_SITE} run-id", config="a recipe, or a YAML file", overrides="for the recipe"))
def plan(
    c: Any, hosts: str = "", inventory: str = "", nproc: str = "", config: str = "", overrides: str = "",
    run_id: str = "", ssh_config: str = "", home: str = "~/muster", python: str = "", image: str = "",
) -> None:  # fmt: skip
    """Who would get which ranks, and each host's exact command. Touches no host."""

    def work() -> int:
        site = ssh_site.site_of(hosts, inventory, nproc, ssh_config, home=home, python=python, image=image)
        asked = {"config": config, "overrides": overrides, "script": _COMMAND, "run_id": run_id}
        _say(ssh.dry_run(site, asked, launch_problems))
        return 0

    _ends(work)
