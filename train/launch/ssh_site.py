"""The hosts of a launch by SSH: who they are, what all of them are asked at once, and how they answer."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.errors import UsageError
from train.launch.inventory import read_inventory
from train.launch.plan import parse_hosts
from train.launch.remedies import Remedies
from train.launch.ssh_code import folder_name
from train.launch.ssh_host import Login, SshHost

AT_ONCE = 64
"""Hosts that are asked at a time."""
LEAVING_S = 2.0
# What stands where a shell, ssh_config's tokens or an engine's options may take it for something else.
_HOST, _USER = re.compile(r"[\w:\[][\w.:%\]-]*"), re.compile(r"\w[\w.@\\+-]*\$?")
_FOLDER, _IMAGE = re.compile(r"[\w~/.][\w~/.@%+=-]*"), re.compile(r"\w[\w./:@-]*")
FAB = Remedies(
    set_up="see README.md, With SSH alone",
    make_environment="make one there, or say --python PATH, or --runtime docker",
    bring_image="fab push --image {image}",
    device="--device",
    on_cpu="--device cpu",
    leave_out="leave hosts out",
    stop="fab stop",
    share="--share",
    run_id="--run-id",
    runs_dir="--home",
)


@dataclass
class Site:
    """Hosts, and where things are on them."""

    logins: list[Login]
    variables: dict[str, dict[str, Any]]
    """Each host's `slots` and `address`, as an inventory has them."""
    home: str = "~/muster"
    """Of code, launches and runs on the hosts."""
    python: str = ""
    image: str = ""
    """The container image; the inventory's, else muster:cpu."""
    hosts: dict[str, SshHost] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = {login.name: SshHost(login) for login in self.logins}

    def usual(self, name: str, otherwise: str) -> str:
        """A variable of the inventory that all hosts share."""
        found = {str(variables.get(name) or "") for variables in self.variables.values()}
        (value,) = found if len(found) == 1 else {""}
        return otherwise if not value or "{{" in value else value

    def given(self, **more: Any) -> dict[str, Any]:
        """What every host is told, whatever is to be done."""
        pythons = [self.python] if self.python else [f"{self.home}/venv/bin/python", "/opt/muster/venv/bin/python"]
        paths = {"folder": f"{self.home}/launches", "runs": f"{self.home}/runs", "home": f"{self.home}/{folder_name()}"}
        return {
            **paths,
            "pythons": pythons,
            "image": self.image or self.usual("muster_image", "muster:cpu"),
            "launch": None,
            "run_id": None,
            **more,
        }

    def each(
        self, function: Callable[[str, SshHost], Any], names: Sequence[str] | None = None, at_once: int = AT_ONCE,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:  # fmt: skip
        """What it gives for each of these hosts; in threads that nobody waits for at the end of the process.

        Once it is not wanted any more, or at Ctrl-C, all hosts are left: what was under way fails.
        """
        found: dict[str, Any] = {}
        slots = threading.Semaphore(at_once)

        def one(name: str) -> None:
            with slots:
                try:
                    found[name] = function(name, self.hosts[name])
                except Exception as error:
                    found[name] = {"failed": True, "msg": str(error) or type(error).__name__}

        chosen = list(self.hosts if names is None else names)
        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in chosen]
        for thread in threads:
            thread.start()
        try:
            while is_wanted() and (alive := [thread for thread in threads if thread.is_alive()]):
                alive[0].join(0.2)  # not longer, so that signals are heard
        finally:
            if any(thread.is_alive() for thread in threads):
                self._leave(threads)
        return {name: found.get(name, {"failed": True, "msg": "left by Ctrl-C"}) for name in chosen}

    def _leave(self, threads: Sequence[threading.Thread]) -> None:
        """What they began here they take away, if they can at once."""
        for host in self.hosts.values():
            host.leave()
        deadline_s = time.monotonic() + LEAVING_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def ask(
        self, state: str, names: Sequence[str] | None = None, timeout_s: float = 60.0, **more: Any
    ) -> dict[str, dict[str, Any]]:
        """`SshHost.ask` of each host."""
        return self.each(lambda name, host: own_words(host.ask(state, self.given(**more), timeout_s)), names)

    def close(self) -> None:
        """Part from all."""
        for host in self.hosts.values():
            host.close()


def site_of(hosts: str, inventory: str, nproc: str, ssh_config: str = "", **more: Any) -> Site:
    """The site that is asked for. Raises UsageError with every problem.

    Args:
        hosts: `a,b:4,me@c`: in rank order, with numbers of ranks where they differ.
        inventory: Ansible's YAML, in place of that.
        nproc: ranks a host.
        ssh_config: in place of ~/.ssh/config.
        more: of `Site`.
    """
    if bool(hosts) == bool(inventory):
        raise UsageError("give either --hosts a,b (in rank order), or --inventory FILE (Ansible's, in YAML)")
    if nproc and not re.fullmatch(r"[1-9]\d{0,3}", nproc):
        raise UsageError(f"--nproc: {nproc!r} must be a whole number of ranks, from 1")
    config = Path(ssh_config).expanduser() if ssh_config else None
    if config is not None and not config.is_file():
        raise UsageError(f"--ssh-config: there is no file {config}")
    problems: list[str] = []
    logins, variables = [], {}
    if inventory:
        for host in read_inventory(Path(inventory)):
            logins.append(_login_of(host.name, host.variables, Path(inventory), config, problems))
            slots = host.variables.get("slots", nproc or None)
            variables[host.name] = {**host.variables, **({} if slots is None else {"slots": slots})}
    else:
        for wanted in parse_hosts(hosts, problems):
            user, _, name = wanted.name.rpartition("@")
            logins.append(Login(name, name, user or None, config=config))
            variables[name] = {"slots": nproc or 1 if wanted.slots is None else wanted.slots}
    problems += _odd(logins, variables, inventory, **more)
    names = [login.name for login in logins]
    problems += [f"--hosts: {name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise UsageError(problems)
    return Site(logins, variables, **more)


def _odd(
    logins: Sequence[Login], variables: Mapping[str, Mapping[str, Any]], inventory: str, home: str = "",
    image: str = "", python: str = "",
) -> list[str]:  # fmt: skip
    """Names and paths that are none."""
    problems = []
    for login in logins:
        for text in dict.fromkeys((login.name, login.host)):
            if not _HOST.fullmatch(text):
                problems.append(f"host {text!r} is no name or address: letters, digits, '.', '-', '_' and ':' make one")
        if login.user is not None and not _USER.fullmatch(login.user):
            problems.append(f"host {login.name}: {login.user!r} is no user's name")
    for option, path in (("--home", home), ("--python", python)):
        if path and not _FOLDER.fullmatch(path):
            problems.append(f"{option}: {path!r}: a path on hosts is made of letters, digits, ./~@%+= and -")
    of_hosts = ((f"{inventory}: muster_image", str(each.get("muster_image") or "")) for each in variables.values())
    for source, name in dict.fromkeys([("--image", image), *of_hosts]):
        if name and "{{" not in name and not _IMAGE.fullmatch(name):
            problems.append(f"{source}: {name!r} is no image's name")
    return problems


def _login_of(
    name: str, variables: Mapping[str, Any], inventory: Path, config: Path | None, problems: list[str]
) -> Login:
    def text(key: str) -> str:
        value = str(variables.get(key) or "")
        value = re.sub(r"\{\{ *inventory_dir *\}\}", lambda _: str(inventory.resolve().parent), value)
        if "{{" in value:
            problems.append(
                f"{inventory}: {key} of {name} is a template, {value}: say it as it is, or use --ssh-config"
            )
            return ""
        return value

    words = shlex.split(text("ansible_ssh_common_args") or text("ansible_ssh_args"))
    if words and (len(words) != 2 or words[0] != "-F"):
        problems.append(
            f"{inventory}: ansible_ssh_common_args of {name}: of ssh's options only -F FILE is known here: put "
            "the others into that file, or into ~/.ssh/config"
        )
    port, key = text("ansible_port"), text("ansible_ssh_private_key_file")
    return Login(
        name, text("ansible_host") or name, text("ansible_user") or None, int(port) if port.isdecimal() else None,
        str(Path(key).expanduser()) if key else None, config or (Path(words[1]).expanduser() if words[1:] else None),
    )  # fmt: skip


def own_words(told: dict[str, Any]) -> dict[str, Any]:
    """What a host told, with `fab`'s remedies."""
    if "problems" in told:
        told["problems"] = [FAB.of(problem) for problem in told["problems"]]
    if "msg" in told:
        told["msg"] = FAB.of(told["msg"])
    return told


def silent(probes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Hosts that could not be looked at, and why."""
    lost = [f"{n} cannot be reached: {p['unreachable_why']}" for n, p in probes.items() if p.get("unreachable_why")]
    return lost + [f"{name}: {probe['msg']}" for name, probe in probes.items() if probe.get("failed")]
