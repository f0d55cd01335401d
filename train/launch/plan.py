"""`python -m train plan`: who gets which ranks, where they meet, and each host's command. Starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from train.errors import UsageError
from train.launch.topology import Host, Plan, make_plan
from train.seam import Exit
from train.slurm_lists import expand_counts, expand_hosts

EPILOG = """examples:
  python -m train plan --hosts node1,node2 --nproc-per-node 8
  python -m train plan --hosts node1:8,node2:4              slots for each host; [fd00::1]:8 for IPv6
  python -m train plan --inventory ansible/inventory/hosts.yml
  python -m train plan --slurm --nproc-per-node 4 --json    within a job: its hosts, in Slurm's order
  python -m train plan --hosts node1,node2 --nproc-per-node 8 --commands -- python -m train run --config ddp

The order of hosts is the order given: host 0 has the first ranks and is MASTER_ADDR. Nothing is looked up or
probed: the agents try the ports in the order shown and agree on the first that is free.
Exit status: 0, or 2 for a plan that cannot be, with every problem named."""

_BRACKETS = re.compile(r"\[(?P<name>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(?P<slots>.*))?")


def main(argv: Sequence[str]) -> int:
    """Print the plan; the exit status."""
    words = list(argv)
    command = words[words.index("--") + 1 :] if "--" in words else []
    try:
        options = make_parser().parse_args(words[: words.index("--")] if "--" in words else words)
        plan = plan_of(options, os.environ)
    except UsageError as error:
        count = "one problem" if len(error.problems) == 1 else f"{len(error.problems)} problems"
        print(f"{count}, there is no plan:", *(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return Exit.USAGE
    except SystemExit:  # --help
        return Exit.FINISHED
    if options.json:
        told = plan.as_dict()
        if options.commands:
            for host in told["hosts"]:
                host["command"] = node_command(plan, host["node_rank"], command)
        print(json.dumps(told, indent=1))
    else:
        print(commands(plan, command) if options.commands else table(plan))
    return Exit.FINISHED


class Wanted(NamedTuple):
    """A host that was asked for; without a number of ranks where none was said."""

    name: str
    address: str
    slots: int | None


def make_parser() -> argparse.ArgumentParser:
    """The options of `plan`. torchrun's spellings with underscores work too."""
    parser = _Parser(
        prog="python -m train plan",
        description="Show who gets which ranks and where they meet, before anything is started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hosts = parser.add_argument_group("hosts (give one)").add_mutually_exclusive_group(required=True)
    hosts.add_argument("--hosts", metavar="A[:SLOTS],B", help="names or addresses, in rank order")
    hosts.add_argument("--inventory", metavar="FILE", type=Path, help="Ansible's YAML: group `nodes`, with `slots`")
    hosts.add_argument("--slurm", action="store_true", help="the hosts of this Slurm job")
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", metavar="N",
        help="ranks a host (also 4,2 or Slurm's 4(x3),2); default: its slots; in Slurm its GPUs",
    )  # fmt: skip
    parser.add_argument("--run-id", "--run_id", metavar="ID", help="the run's name; ports follow from it")
    parser.add_argument("--master-port", "--master_port", metavar="PORT", type=int, help="the first one to try")
    parser.add_argument("--control-port", "--control_port", metavar="PORT", type=int, help="the agents' own, likewise")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--commands", action="store_true", help="what to run on each host; its ranks' command after --")
    return parser


def plan_of(options: argparse.Namespace, env: Mapping[str, str]) -> Plan:
    """The plan that the options ask for. Raises UsageError with all problems."""
    problems: list[str] = []
    wanted = _wanted(options, env, problems)
    counts = _counts(options, env, len(wanted), problems, needed=any(host.slots is None for host in wanted))
    hosts = [
        Host(host.name, host.address, count if host.slots is None else host.slots)
        for host, count in zip(wanted, counts, strict=True)
    ]
    run_id = options.run_id or (slurm_run_id(env) if options.slurm else None)
    try:
        plan = make_plan(hosts, run_id=run_id, master_port=options.master_port, control_port=options.control_port)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    return plan


def parse_hosts(text: str, problems: list[str]) -> list[Wanted]:
    """Hosts of `a:2,[fd00::1]:4,c`; what cannot be read is told in `problems`."""
    hosts: list[Wanted] = []
    for entry in map(str.strip, re.split(r",(?![^\[]*\])", text)):
        bracketed = _BRACKETS.fullmatch(entry)
        name, slots = entry, None
        if bracketed:
            name, slots = bracketed["name"], bracketed["slots"]
        elif entry.count(":") == 1:
            name, slots = entry.split(":")
        if not name:
            problems.append(f"--hosts: there is an empty name in {text!r}")
        elif "[" in name:
            problems.append(f"--hosts: {entry!r} looks like a range: name each host, or use --inventory or --slurm")
        elif slots is not None and not re.fullmatch(r"[0-9]{1,6}", slots):
            problems.append(f"--hosts: {entry!r}: the number of ranks after the colon is {slots!r}, not a whole number")
        else:
            hosts.append(Wanted(name, name, None if slots is None else int(slots)))
    return hosts


def slurm_run_id(env: Mapping[str, str]) -> str | None:
    """A run's name that survives Slurm's requeues: from the job's or the array task's id."""
    if env.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm-{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return f"slurm-{env['SLURM_JOB_ID']}" if env.get("SLURM_JOB_ID") else None


def table(plan: Plan) -> str:
    """The plan for people."""
    rows = [("node rank", "host", "address", "ranks")]
    for i, host in enumerate(plan.hosts):
        ranks = plan.ranks(i)
        span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        rows.append((str(i), host.name, host.address, span))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    on = "1 host" if len(plan.hosts) == 1 else f"{len(plan.hosts)} hosts"
    lines += [
        "",
        f"{plan.world_size} rank{'s' * (plan.world_size > 1)} on {on}; run: {plan.run_id or 'named at the start'}",
        f"MASTER_ADDR  {plan.master_addr}",
        f"MASTER_PORT  the first free one of {' '.join(map(str, plan.master_ports))}",
        f"agents meet  on the first free one of {' '.join(map(str, plan.control_ports))}",
    ]
    if plan.master_ports[0] >= 32768:
        lines.append("note: systems hand out ports from 32768 up to clients: the first one may be taken at times")
    return "\n".join(lines)


def node_command(plan: Plan, node_rank: int, command: Sequence[str]) -> list[str]:
    """The words that start the agent of a host."""
    return ["python", "-m", "train", "node", *plan.node_arguments(node_rank), "--", *command]


def commands(plan: Plan, command: Sequence[str]) -> str:
    """A block for each host: a comment that names it, and the command to run there, quoted for a shell."""
    blocks = []
    for i, host in enumerate(plan.hosts):
        words = shlex.join(node_command(plan, i, command))
        blocks.append(f"# on {host.name} ({host.address})\n{words if command else words + ' COMMAND...'}")
    return "\n\n".join(blocks)


def _wanted(options: argparse.Namespace, env: Mapping[str, str], problems: list[str]) -> list[Wanted]:
    """The hosts, from wherever they are named."""
    if options.slurm:
        return [Wanted(name, name, None) for name in _slurm_hosts(env)]
    if options.hosts is not None:
        return parse_hosts(options.hosts, problems)
    from train.launch.inventory import read_inventory

    wanted = []
    for host in read_inventory(options.inventory):
        try:
            slots = None if options.nproc_per_node else host.slots(None)
        except UsageError as error:
            problems += error.problems
            slots = 1
        wanted.append(Wanted(host.name, host.address, slots))
    return wanted


def _slurm_hosts(env: Mapping[str, str]) -> list[str]:
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UsageError("--slurm: this is no Slurm job: SLURM_JOB_NODELIST is not set; run it within sbatch or salloc")
    return expand_hosts(listed)


def _counts(
    options: argparse.Namespace, env: Mapping[str, str], hosts: int, problems: list[str], *, needed: bool
) -> list[int]:
    """Ranks for each host that has no number of its own."""
    given, source = options.nproc_per_node, "--nproc-per-node"
    if given is None and options.slurm and env.get("SLURM_GPUS_ON_NODE"):
        given, source = env["SLURM_GPUS_ON_NODE"], "SLURM_GPUS_ON_NODE"
    if given is None:
        if needed:
            ways = "ask Slurm for --gpus-per-node, or " if options.slurm else "name it after each host (a:2,b:4), or "
            problems.append(f"the number of ranks a host is not said: {ways}give --nproc-per-node N")
        return [1] * hosts
    try:
        counts = expand_counts(given)
    except UsageError:
        problems.append(f"{source}: {given!r} must be a whole number, or one for each host such as 4(x3),2")
        return [1] * hosts
    if len(counts) == 1:
        return counts * hosts
    if len(counts) != hosts:
        problems.append(f"{source}: {given!r} has numbers for {len(counts)} hosts, but there are {hosts}")
        return [1] * hosts
    return counts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (python -m train plan --help)")
