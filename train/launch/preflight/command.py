"""The command line of `python -m train preflight`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.errors import UsageError
from train.launch.preflight import gpus, quarantine
from train.launch.preflight.asked import Asked
from train.launch.preflight.conclusion import Told, as_lines, conclude, reports_in
from train.launch.topology import Host, Plan, make_plan
from train.seam import RUNS_DIR, SECRET_FILE, Exit

EPILOG = """examples:
  python -m train preflight                           this host alone
  fab preflight --hosts a,b --nproc 8                 all hosts, and between them; the same by
  ansible-playbook preflight.yml                        (in ansible/) or
  sbatch --nodes=4 --gpus-per-node=8 slurm/preflight.sbatch
  python -m train preflight --judge REPORTS           the table, from what hosts have told (a file; - is stdin)
  python -m train preflight --quarantined FILE        hosts in a quarantine: sbatch --exclude=$(…)

Between hosts without a launcher: the same command on each, with its own --node-rank and the same secret:
  python -m train preflight --plan "$(python -m train plan --hosts a,b --nproc-per-node 8 --json)" --node-rank 0 \\
      --secret-file secret >report.0

Exit status: 0 fit · 2 usage · 3 a host is not fit."""


def main(argv: Sequence[str]) -> int:
    """Look, and say what was found."""
    words = list(argv)
    try:
        options = _parser().parse_args(words)
        if options.quarantined:
            print(",".join(quarantine.quarantined(Path(options.quarantined))))
            return Exit.FINISHED
        if options.judge:
            return _judge(options)
        return _one_of_many(options) if options.plan else _alone(options)
    except UsageError as error:
        print(*(f"preflight: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return Exit.USAGE
    except SystemExit:  # --help
        return Exit.FINISHED
    except KeyboardInterrupt:
        print("preflight: left by Ctrl-C", file=sys.stderr)
        return Exit.STOPPED_UNSAVED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m train preflight", allow_abbrev=False, epilog=EPILOG,
        description="Is this host fit for a job, and are all together? What is wrong with whom, and what mends it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="P", help="ranks a host (1)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(auto: cuda where GPUs are)")
    parser.add_argument("--runs-dir", metavar="DIR", help="where run folders are (runs)")
    floors = parser.add_argument_group("floors: below one that is given, a host is not fit")
    floors.add_argument("--min-memlock-mb", type=int, metavar="MB", help="memory that may be locked (RDMA)")
    floors.add_argument("--min-shm-mb", type=int, metavar="MB", help="of /dev/shm")
    floors.add_argument("--min-nofile", type=int, metavar="N", help="files that may be open")
    floors.add_argument("--min-free-mb", type=int, default=1024, metavar="MB", help="free for run folders (1024)")
    floors.add_argument("--min-mb-per-s", type=float, metavar="X", help="between hosts (an eighth of their median)")
    floors.add_argument("--max-skew-s", type=float, default=1.0, metavar="S", help="between clocks (1)")
    parser.add_argument("--no-all-reduce", action="store_true", help="do not add up over the network with torch")
    parser.add_argument("--patience-s", type=float, default=10.0, metavar="S", help="for other hosts to come (10)")
    parser.add_argument("--json", action="store_true", help="as JSON, in place of a table")
    parser.add_argument("--quarantine", metavar="FILE", help="add hosts that are not fit to this file")
    parser.add_argument("--quarantined", metavar="FILE", help="print the hosts in this file, and leave")
    many = parser.add_argument_group(
        "as one of several hosts, for launchers: prints a report, to be judged with others'"
    )
    many.add_argument("--judge", metavar="FILE", help="reports of all hosts, a line each; - is standard input")
    many.add_argument("--plan", metavar="JSON", help="what `plan --json` prints")
    many.add_argument("--node-rank", type=int, metavar="I", help="which host of the plan this is")
    secret = many.add_mutually_exclusive_group()
    secret.add_argument("--secret-file", metavar="FILE", help=f"what all hosts share (or {SECRET_FILE})")
    secret.add_argument("--secret-stdin", action="store_true", help="it is the first line of standard input")
    return parser


def asked_of(options: argparse.Namespace, env: Mapping[str, str]) -> Asked:
    """What is to be looked at."""
    device = options.device
    if device == "auto":
        device = "cuda" if gpus.files() else "cpu"
    return Asked(
        device=device, runs_dir=str(Path(options.runs_dir or env.get(RUNS_DIR) or "runs").absolute()),
        min_memlock_mb=options.min_memlock_mb, min_shm_mb=options.min_shm_mb, min_nofile=options.min_nofile,
        min_free_mb=options.min_free_mb, min_mb_per_s=options.min_mb_per_s, max_skew_s=options.max_skew_s,
        patience_s=options.patience_s, reduces=not options.no_all_reduce,
    )  # fmt: skip


def checked_floors(words: Sequence[str]) -> None:
    """Refuse what a launcher must not pass on, or nobody understands. Raises UsageError."""
    found = _parser().parse_args(list(words))
    own = ("judge", "plan", "node_rank", "secret_file", "secret_stdin", "quarantine", "quarantined", "json")
    if any(getattr(found, name) not in (None, False) for name in own):
        raise UsageError(f"floors: {' '.join(words)!r} has options that are the launcher's own")


def plan_from(text: str) -> Plan:
    """Of JSON as `plan --json` prints it. Raises UsageError."""
    try:
        told = json.loads(text)
        hosts = [Host(str(host["name"]), str(host["address"]), int(host["slots"])) for host in told["hosts"]]
        ports = {name: tuple(map(int, told[name])) for name in ("master_ports", "control_ports")}
        return Plan(tuple(hosts), ports["master_ports"], ports["control_ports"], told.get("run_id"))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--plan is not what `python -m train plan --json` prints: {error!r}") from None


def _alone(options: argparse.Namespace) -> int:
    name = socket.gethostname()
    plan = make_plan([Host(name, name, max(1, options.nproc_per_node))])
    asked = asked_of(options, os.environ)
    asked = replace(asked, reduces=asked.reduces and asked.device == "cuda")  # with whom else
    report = _report(plan, 0, secrets.token_bytes(16), asked)
    return say(conclude(plan, [report], {}, {}, options.quarantine, as_json=options.json))


def _report(plan: Plan, node_rank: int, secret: bytes, asked: Asked) -> dict[str, Any]:
    from train.launch.preflight.member import report_of

    return asyncio.run(report_of(plan, node_rank, secret, asked))


def _one_of_many(options: argparse.Namespace) -> int:
    plan = plan_from(options.plan)
    if options.node_rank is None or not 0 <= options.node_rank < len(plan.hosts):
        raise UsageError(f"--node-rank {options.node_rank} must be from 0 to {len(plan.hosts) - 1}, as in the plan")
    file = options.secret_file or os.environ.get(SECRET_FILE)
    if options.secret_stdin:
        secret = sys.stdin.buffer.readline().strip()
    elif file:
        try:
            secret = Path(file).read_bytes().strip()
        except OSError as error:
            raise UsageError(f"--secret-file: {error}") from None
    else:
        raise UsageError("what all hosts share is missing: --secret-file or --secret-stdin")
    if len(secret) < 16:
        raise UsageError("the secret must have 16 characters or more: head -c 32 /dev/urandom | base64")
    report = {**_report(plan, options.node_rank, secret, asked_of(options, os.environ)), "plan": plan.as_dict()}
    print(*as_lines(report), sep="\n", flush=True)
    return Exit.FINISHED


def _judge(options: argparse.Namespace) -> int:
    try:
        text = sys.stdin.read() if options.judge == "-" else Path(options.judge).read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"--judge: {options.judge}: {error.strerror}") from None
    reports = reports_in(text)
    plan = plan_from(options.plan or json.dumps(reports[0]["plan"])) if options.plan or reports else None
    silent = {} if plan else {"every host": "no host told anything: what they say is above"}
    return say(conclude(plan, reports, {}, silent, options.quarantine, as_json=options.json))


def say(told: Told) -> int:
    """Print it; the exit code."""
    print(told.words)
    if told.note:
        print(told.note, file=sys.stderr)
    return told.exit_code


if __name__ == "__main__":  # for the Python of a host that has nothing else (slurm/common.sh)
    sys.exit(main(sys.argv[1:]))
