"""What a launcher was asked for → who gets which rank, each host's words for its agent, or everything that is wrong.

For launchers that start agents on hosts from afar (`ansible/launch.yml`). Touches no host.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.errors import UsageError
from train.launch.inventory import InventoryHost
from train.launch.plan import table
from train.launch.preflight import quarantine
from train.launch.remedies import ANSIBLE, Remedies
from train.launch.spelling import nearest
from train.launch.topology import Host, Plan, make_plan, port_candidates

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "")
CheckConfig = Callable[[list[str], int], list[str]]
"""The words behind `run` and the world size → problems."""

LEASE_S = 30.0
"""How long a job goes on when nobody watches it any more."""


@dataclass
class Asked:
    """The variables of a launch, as text or in their own types; each problem with them is kept."""

    values: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        """A text; empty where nothing is given."""
        value = self.values.get(name)
        return "" if value is None else str(value).strip()

    def words(self, name: str) -> list[str]:
        """A command line: a list, or a text with quotes as in a shell. No shell ever sees it."""
        value = self.values.get(name)
        if isinstance(value, list | tuple):
            return [str(word) for word in value]
        try:
            return shlex.split(self.text(name))
        except ValueError as error:
            self.problems.append(f"{name}: {self.text(name)!r} has no end: {error}")
            return []

    def flag(self, name: str) -> bool:
        """Yes or no."""
        word = self.text(name).lower()
        if word not in _TRUE + _FALSE:
            self.problems.append(f"{name}: {self.text(name)!r} must be true or false")
        return word in _TRUE

    def number(self, name: str, least: float, kind: type = int) -> Any:
        """A number from `least`; None where nothing is given, or 0 that cannot be meant."""
        text = self.text(name)
        if not text or (least > 0 and text == "0"):
            return None
        what = "a whole number" if kind is int else "a number of seconds"
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not least <= value <= 1e9:
            self.problems.append(f"{name}: {text!r} must be {what} from {least:g} to 1e+09")
            return None
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """One of a few words."""
        word = self.text(name)
        if word not in choices:
            self.problems.append(f"{name}: {word!r} must be one of {', '.join(choices)}{nearest(word, choices)}")
        return word


def plan_from(names: Sequence[str], variables: Mapping[str, Mapping[str, Any]], **more: Any) -> Plan:
    """The plan for hosts of an inventory, in this order: the same as that of `python -m train plan --inventory`.

    Raises UsageError.
    """
    problems: list[str] = []
    hosts = []
    for name in names:
        host = InventoryHost(name, variables[name], "inventory")
        try:
            hosts.append(Host(name, host.address, host.slots(None)))
        except UsageError as error:
            problems += [problem.removesuffix("; or --nproc-per-node") for problem in error.problems]
    if problems:
        raise UsageError(problems)
    return make_plan(hosts, **more)


def launch(
    asked: Mapping[str, Any],
    names: Sequence[str],
    variables: Mapping[str, Mapping[str, Any]],
    by: str,
    check_config: CheckConfig = lambda words, world_size: [],
    lease_s: float = LEASE_S,
    remedies: Remedies = ANSIBLE,
) -> dict[str, Any]:
    """Everything that is known of a launch before a host is touched; `problems` is empty where it can be.

    Args:
        asked: the launch's variables by the names that people give them.
        names: the hosts at hand, in rank order.
        variables: each host's.
        by: who launches.
        check_config: what is wrong with a config, where this machine has what it takes to tell; else the ranks will.
        lease_s: how long the job goes on when nobody watches it any more, unless it was detached.
        remedies: the launcher's.
    """
    given = Asked(asked)
    problems = given.problems
    launch_id = new_id()
    try:
        names, left_out = quarantine.left(names, given.text("quarantine"))
    except UsageError as error:
        left_out = []
        problems += error.problems
    count = given.number("nodes", 1)
    if count is not None and count > len(names):
        problems.append(f"nodes: {count} are asked for, but there are {len(names)}: {', '.join(names) or 'none'}")
    chosen = list(names if count is None else names[:count])
    share, detach = given.flag("share"), given.flag("detach")
    given.flag("checkpoints")
    runtime = given.one_of("runtime", ("docker", "venv"))
    device = given.one_of("device", ("auto", "cpu", "cuda"))
    forks = given.number("forks", 1)
    if forks is not None and forks < len(chosen):
        problems.append(
            f"forks: {forks} hosts are watched at a time, but there are {len(chosen)}: add -f {len(chosen)}"
        )
    plan = _plan(given, chosen, variables, port_candidates(launch_id, 1)[0] if share else None)
    command, files = _command(given, plan, check_config, remedies)
    options = _options(given, None if detach else lease_s)
    grace_s = given.number("grace", 0, float)
    problems += variable_problems(given.values.get("job_environment") or {})
    told = {} if plan is None else _told(plan, options)
    return {
        "problems": list(dict.fromkeys(problems)), "id": launch_id, "by": by, "names": chosen,
        "share": share, "detach": detach, "runtime": runtime, "device": device,
        "left_out": left_out, "command": command, "files": files, "ours": command[:1] == ["run"],
        "lease_s": None if detach else lease_s, "grace_s": grace_s, **told,
    }  # fmt: skip


def _plan(
    given: Asked, names: Sequence[str], variables: Mapping[str, Mapping[str, Any]], port: int | None
) -> Plan | None:
    try:
        return plan_from(names, variables, run_id=given.text("run_id") or None, master_port=port)
    except UsageError as error:
        given.problems += [problem.replace("--run-id", "run_id") for problem in error.problems]
        return None


def _told(plan: Plan, options: Sequence[str]) -> dict[str, Any]:
    return {
        "table": table(plan),
        "world_size": plan.world_size,
        "hosts": {
            host.name: {
                "node_rank": i, "slots": host.slots, "address": host.address,
                "arguments": [*plan.node_arguments(i), *options],
            }
            for i, host in enumerate(plan.hosts)
        },
        "ports": [*plan.control_ports],
    }  # fmt: skip


def _options(given: Asked, lease_s: float | None) -> list[str]:
    """The agents' patience, as asked for."""
    names = {
        "time_limit": ("--time-limit-s", 1, float), "grace": ("--grace-s", 0, float),
        "join_timeout": ("--join-timeout-s", 1, float), "idle_timeout": ("--idle-timeout-s", 1, float),
        "max_restarts": ("--max-restarts", 0, int),
    }  # fmt: skip
    words = [] if lease_s is None else ["--lease-s", f"{lease_s:g}"]
    for name, (option, least, kind) in names.items():
        value = given.number(name, least, kind)
        if value is not None:
            words += [option, f"{value:g}" if kind is float else str(value)]
    return words


def _command(
    given: Asked, plan: Plan | None, check_config: CheckConfig, remedies: Remedies
) -> tuple[list[str], dict[str, str]]:
    """What each rank runs, and files of this machine that it needs, by the names they get beside the agent."""
    script, overrides, config = given.words("script"), given.words("overrides"), given.text("config")
    if script:
        both = [name for name, value in (("config", config), ("overrides", overrides)) if value]
        if both:
            given.problems.append(f"script and {' and '.join(both)}: a script has no recipe; put its options behind it")
        return script, {}
    own = {"--run-id": remedies.run_id, "--runs-dir": remedies.runs_dir}
    for word in overrides:
        name = word.partition("=")[0].replace("_", "-")
        if name in own:
            given.problems.append(f"overrides: give {own[name]} in place of {word}")
    config = config or "ddp"
    if plan is not None:
        given.problems += check_config(["--config", config, *overrides], plan.world_size)
    file = Path(config)
    if file.suffix in (".yaml", ".yml") and file.is_file():
        return ["run", "--config", "{files}/config.yaml", *overrides], {"config.yaml": file.read_text(encoding="utf-8")}
    return ["run", "--config", config, *overrides], {}


def variable_problems(given: object) -> list[str]:
    """What is wrong with a site's variables for ranks; their values are nobody's business."""
    if not isinstance(given, Mapping):
        return ["job_environment: it must be a table: NAME: value"]
    problems = []
    for name, value in given.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            problems.append(f"job_environment: {str(name)!r} is no name of a variable: letters, digits and _")
        elif not isinstance(value, str | int | float):
            problems.append(f"job_environment: {name} must be a text or a number, and is {type(value).__name__}")
        elif "\0" in str(value):
            problems.append(f"job_environment: {name} has a zero byte in it, which no variable can have")
    return problems


def device_of(asked: str, gpus: Mapping[str, int], remedies: Remedies = ANSIBLE) -> tuple[str, list[str]]:
    """Where to train, and what speaks against it.

    Args:
        asked: auto, cpu or cuda.
        gpus: GPU device files on each host.
        remedies: the launcher's.
    """
    if asked != "auto":
        return asked, []
    having = [name for name, count in gpus.items() if count]
    lacking = [name for name in gpus if name not in having]
    if having and lacking:
        return "cuda", [
            f"{remedies.device} is auto, but {', '.join(having)} has GPUs and {', '.join(lacking)} has none: "
            f"say {remedies.on_cpu} or {remedies.leave_out}"
        ]
    return ("cuda" if having else "cpu"), []


def new_id() -> str:
    """A name for a launch."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def is_id(text: str) -> bool:
    """Whether this names a launch."""
    return bool(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", text))
