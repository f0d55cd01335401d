"""Filters that ask Muster's launch plane (train/launch): who gets which rank, what is wrong, how it ended."""

from __future__ import annotations

import getpass
import ipaddress
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ansible.constants as C
import yaml
from ansible.utils.display import Display

HERE = Path(__file__).resolve().parent.parent
_ROOT = str(HERE.parent)
sys.path.insert(0, _ROOT)  # until `train` is found: what else lies there must not be taken for packages
import train  # noqa: E402, F401

sys.path.remove(_ROOT)

from train.errors import UsageError  # noqa: E402
from train.launch import ending, fitness, overview, request, spelling  # noqa: E402
from train.launch.pack import pack  # noqa: E402
from train.launch.preflight import afar  # noqa: E402
from train.launch.watch import Notes  # noqa: E402


def muster_misspelt(known: Sequence[str]) -> list[str]:
    """Variables given by `-e` that nobody reads; `known` are those of a playbook, beside those of all roles."""
    from ansible.parsing.dataloader import DataLoader
    from ansible.utils.vars import load_extra_vars

    given = dict(load_extra_vars(DataLoader()))
    loose = given.pop("_raw_params", None)
    problems = [] if loose is None else [
        f"-e: {loose!r} is no NAME=value; a value with blanks has quotes of its own: -e 'script=\"python my.py\"'"
    ]  # fmt: skip
    return problems + spelling.misspelt([*given], [*known, *_shared(), *spelling.OPTIONAL])


def muster_misspelt_hosts(names: Sequence[str], variables: Mapping[str, Any]) -> list[str]:
    """Variables of the inventory that nobody reads, and that can only be ours; where they look like it, a warning."""
    certain, likely = spelling.misspelt_by_hosts({name: [*variables[name]] for name in names}, _shared())
    for problem in likely:
        Display().warning(problem)
    return certain


def muster_networks(given: str | Sequence[str]) -> dict[str, list[str]]:
    """One network or several, in a list or with commas between: `ip`, `ip6`, `all` of them, and what is `wrong`."""
    words = [given] if isinstance(given, str) else [*given]
    found: dict[str, list[str]] = {"ip": [], "ip6": [], "all": [], "wrong": []}
    for word in (part.strip() for text in words for part in str(text).split(",")):
        try:
            network = ipaddress.ip_network(word, strict=False)
        except ValueError:
            found["wrong"] += [word] if word else []
            continue
        for kind in ("ip" if network.version == 4 else "ip6", "all"):
            found[kind].append(str(network))
    return found


def muster_by() -> str:
    """Who sits here."""
    return f"{getpass.getuser()} on {socket.gethostname()}"


def muster_launch(asked: Mapping[str, Any], names: Sequence[str], variables: Mapping[str, Any]) -> dict[str, Any]:
    """The launch that is asked for: train.launch.request.launch."""
    problems = muster_misspelt([*asked]) + muster_misspelt_hosts(names, variables)
    told = request.launch(asked, [*names], variables, muster_by(), _config_problems)
    archive, left_out = "", []
    if asked.get("code"):
        archive = str(Path(C.DEFAULT_LOCAL_TMP) / "code.tgz")
        try:
            left_out = pack(Path(str(asked["code"])).expanduser(), Path(archive))
        except UsageError as error:
            problems += error.problems
    return {**told, "archive": archive, "left_out": left_out, "problems": [*problems, *told["problems"]]}


def _shared() -> list[str]:
    """Variables of all roles and playbooks."""
    files = [HERE / "group_vars" / "all.yml", *HERE.glob("roles/*/defaults/main.yml")]
    return [name for file in files if file.exists() for name in yaml.safe_load(file.read_text("utf-8")) or {}]


def _config_problems(words: list[str], world_size: int) -> list[str]:
    """As a rank would tell them, where this machine has jsonargparse."""
    try:
        from train.options import launch_problems
    except ImportError:
        return []
    return launch_problems(words, world_size)


def muster_plan(names: Sequence[str], variables: Mapping[str, Any]) -> dict[str, Any]:
    """The plan for these hosts, in this order, as `python -m train plan --json` prints it."""
    return request.plan_from([*names], variables).as_dict()


def muster_of(names: Sequence[str], hosts: Mapping[str, Any], registered: str) -> dict[str, Any]:
    """What a task registered on each host, by the hosts' names."""
    return {name: hosts[name].get(registered) or {} for name in names}


def muster_is_up(names: Sequence[str], hosts: Mapping[str, Any]) -> bool:
    """Whether the agents of all hosts have started."""
    return all((hosts[name].get("job_started") or {}).get("is_up") for name in names)


def muster_is_interrupted(_: object) -> bool:
    """Whether somebody pressed Ctrl-C while agents were started."""
    return Notes(Path(C.DEFAULT_LOCAL_TMP) / "muster").read("stop") is not None


def muster_verdict(names: Sequence[str], hosts: Mapping[str, Any]) -> dict[str, Any]:
    """How the job ended, by what tasks of the role job registered: train.launch.ending.verdict."""
    return ending.verdict(names, {name: _told(hosts[name]) for name in names})


def _told(variables: Mapping[str, Any]) -> dict[str, Any]:
    started, watched, ended = (variables.get(f"job_{what}") or {} for what in ("started", "watched", "ended"))
    is_refused = bool(started) and not started.get("is_up")
    told = {**ended, "lost": bool(watched.get("lost") or ended.get("unreachable")), "failed": is_refused}
    if is_refused:
        told["msg"] = started.get("msg") or "its agent could not be started"
    return told


def muster_last_words(verdict: Mapping[str, Any], names: Sequence[str], hosts: Mapping[str, Any]) -> str:
    """What to say at the end: train.launch.ending.last_words."""
    return ending.last_words(verdict, names, {name: hosts[name].get("job_collected") or {} for name in names})


def muster_brought(launch: Mapping[str, Any], hosts: Mapping[str, Any]) -> str:
    """What came of collecting a launch's results: train.launch.ending.brought_words."""
    names = launch["names"]
    return "\n".join(ending.brought_words({name: hosts[name].get("job_collected") or {} for name in names}))


def muster_part(
    launch: Mapping[str, Any], probes: Mapping[str, Mapping[str, Any]], variables: Mapping[str, Any], floors: str
) -> dict[str, Any]:
    """Who takes part in a preflight, and by what words: train.launch.preflight.afar."""
    lost = afar.lost_of(probes)
    names = [name for name in launch["names"] if name not in lost]
    device, problems = request.device_of(launch["device"], {name: probes[name].get("gpu_files", 0) for name in names})
    try:
        arguments = afar.words_of(names, variables, device, shlex.split(floors)) if names else {}
    except (UsageError, ValueError) as error:
        problems, arguments = [*problems, *str(error).splitlines()], {}
    return {
        "names": names, "lost": lost, "device": device, "arguments": arguments, "problems": problems,
        "wait_s": afar.WAIT_S,
    }  # fmt: skip


def muster_preflight(
    part: Mapping[str, Any], inspected: Mapping[str, Mapping[str, Any]], variables: Mapping[str, Any], file: str
) -> dict[str, Any]:
    """What comes of it: train.launch.preflight.afar.verdict."""
    said = {name: afar.said_of(inspected[name]) for name in part["names"]}
    told = afar.verdict(part["names"], variables, said, part["lost"], file)
    return {"words": told.words, "exit_code": told.exit_code}


class FilterModule:
    """What Ansible asks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By the names that playbooks use."""
        return {
            "muster_plan": muster_plan,
            "muster_launch": muster_launch,
            "muster_misspelt": muster_misspelt,
            "muster_networks": muster_networks,
            "muster_misspelt_hosts": muster_misspelt_hosts,
            "muster_device": request.device_of,
            "muster_unfit": fitness.unfit,
            "muster_part": muster_part,
            "muster_preflight": muster_preflight,
            "muster_refusal": ending.refusal,
            "muster_is_up": muster_is_up,
            "muster_is_interrupted": muster_is_interrupted,
            "muster_verdict": muster_verdict,
            "muster_last_words": muster_last_words,
            "muster_status": overview.status,
            "muster_silent": overview.silent,
            "muster_pick": overview.pick,
            "muster_stopped": overview.stopped,
            "muster_of": muster_of,
            "muster_brought": muster_brought,
            "muster_by": lambda _: muster_by(),
        }
