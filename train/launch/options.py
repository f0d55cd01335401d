"""The command line of `python -m train node`."""

from __future__ import annotations

import argparse
import os
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.errors import UsageError
from train.launch.afar import Lease
from train.launch.topology import Host, Plan, is_loopback, make_plan, port_candidates
from train.launch.views import Terms
from train.seam import RUN_ID, RUNS_DIR, SECRET_FILE

DEFAULT_PORT = 29500  # torchrun's and the tutorial's own
_SHORTEST_SECRET = 16
_MOST_HOSTS, _MOST_RANKS = 100_000, 4096
_LONGEST_S = 1e9

EPILOG = """examples:
  one host, four ranks:
    python -m train node --standalone --nproc-per-node 4 -- run --config ddp
  two hosts, on each one its own --node-rank; the secret's file is the same on both:
    head -c 32 /dev/urandom | base64 > secret && chmod 600 secret
    MUSTER_SECRET_FILE=secret python -m train node --nnodes 2 --node-rank 0 --nproc-per-node 8 \\
        --master-addr node0 -- run --config ddp
  any script of your own:
    python -m train node --standalone --nproc-per-node 2 -- python my_script.py --my-option 1

after the `--`: `run …` is `python -m train run …`; `script.py …` is run by this Python; anything else as it is.
to stop: Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 at any agent, `python -m train stop RUN`, or a file STOP in the run folder.
exit codes: 0 finished · 1 Muster's own bug · 2 usage · 3 not fit · 4 a host never joined · 5 a rank failed · 6 hang
            7 a host was lost · 8 stopped with nothing saved · 75 stopped with a good checkpoint, run it again to go on
"""


@dataclass(frozen=True)
class NodeOptions:
    """What one agent was told."""

    terms: Terms
    node_rank: int
    run_id: str | None
    runs_dir: Path
    secret: bytes
    """Empty on a single host."""
    die_with_stdin: bool
    lease: Lease | None
    """What whoever watches from another machine renews."""


def parse(argv: Sequence[str], env: Mapping[str, str]) -> NodeOptions:
    """Read the command line. Raises UsageError with all that is wrong with it; exits on --help."""
    found = _parser().parse_args(_with_hyphens(argv))
    problems = _nested(env)
    nnodes = 1 if found.standalone else found.nnodes
    command = tuple(_command(found.command))
    if not command:
        problems.append("what to run is missing: -- run --config ddp, or -- python my_script.py")
    problems += _misplaced(found, nnodes)
    run_id = found.run_id or env.get(RUN_ID) or None
    if run_id is not None and not is_name(run_id):
        named = "--run-id" if found.run_id else RUN_ID
        problems.append(f"{named} {run_id!r} must be the name of a folder, not a path")
    slots = _slots(found.nproc_per_node, nnodes, env, problems)
    if found.die_with_stdin and not _can_end(0):
        problems.append("--die-with-stdin: standard input is no pipe, socket or terminal, so nobody can end it")
    if found.lease_s is not None and found.lease_file is None:
        problems.append("--lease-s needs --lease-file: the file that whoever watches touches")
    plan = None if problems else _plan(found, nnodes, slots, problems)
    if not problems and nnodes > 1 and found.node_rank and is_loopback(found.master_addr):
        problems.append(f"--master-addr {found.master_addr} is this host itself: give an address of host 0")
    secret = b"" if nnodes == 1 or problems else _secret(found.secret_stdin, env, problems)
    for name in ("join_timeout_s", "grace_s", "idle_timeout_s", "time_limit_s", "lease_s", "max_restarts"):
        value = getattr(found, name)
        if value is not None and not 0 <= value < _LONGEST_S:
            problems.append(f"--{name.replace('_', '-')} {value:g} must be a number from 0 to {_LONGEST_S:g}")
    if problems:
        raise UsageError(problems)
    assert plan is not None
    terms = Terms(
        plan=plan,
        command=command,
        join_timeout_s=found.join_timeout_s,
        grace_s=found.grace_s,
        max_restarts=found.max_restarts,
        idle_timeout_s=found.idle_timeout_s,
        time_limit_s=found.time_limit_s,
        names_given=found.hosts is not None,
    )
    runs_dir = Path(found.runs_dir or env.get(RUNS_DIR) or "runs").absolute()
    lease = None if found.lease_file is None else Lease(Path(found.lease_file).absolute(), found.lease_s)
    return NodeOptions(terms, found.node_rank or 0, run_id, runs_dir, secret, found.die_with_stdin, lease)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m train node",
        description="Start this host's ranks, watch them together with the other hosts' agents, end together, say why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    who = parser.add_argument_group("who and where")
    who.add_argument("--standalone", action="store_true", help="this host alone; it finds a free port")
    who.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    who.add_argument("--node-rank", type=int, metavar="I", help="this host's number, from 0")
    who.add_argument(
        "--nproc-per-node", default="1", metavar="P", help="ranks a host: a number, one for each host (4,2), or gpu"
    )
    who.add_argument("--master-addr", metavar="A", help="where the others reach host 0")
    who.add_argument("--master-port", type=int, metavar="Q", help=f"first port to try for the ranks ({DEFAULT_PORT})")
    who.add_argument("--control-port", type=int, metavar="C", help="first port to try for the agents (follows from Q)")
    who.add_argument("--hosts", metavar="A,B", help="the hosts' names in rank order, to say them in messages")
    run = parser.add_argument_group("run")
    run.add_argument("--run-id", metavar="NAME", help="name of the run folder (default: the run itself finds it)")
    run.add_argument("--runs-dir", metavar="DIR", help="where run folders are (default: runs)")
    run.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start again so often after a failure")
    wait = parser.add_argument_group("patience, in seconds")
    wait.add_argument("--join-timeout-s", type=float, default=120.0, metavar="S", help="for all hosts to come (120)")
    wait.add_argument("--grace-s", type=float, default=300.0, metavar="S", help="to save after a stop request (300)")
    wait.add_argument("--time-limit-s", type=float, metavar="S", help="stop by then, the grace before it")
    wait.add_argument("--idle-timeout-s", type=float, metavar="S", help="silence of all ranks that means a hang")
    more = parser.add_argument_group("for launchers")
    more.add_argument("--die-with-stdin", action="store_true", help="stop when standard input ends (SSH, docker -i)")
    more.add_argument("--lease-file", metavar="FILE", help="stop when its text says `stop WHO`; `kill WHO`: at once")
    more.add_argument("--lease-s", type=float, metavar="S", help="stop when nobody has touched it for so long")
    more.add_argument("--secret-stdin", action="store_true", help="the job's secret is the first line of stdin")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what each rank runs")
    return parser


_OURS = ("run", "collectives", "verify")
"""Commands of `python -m train` that run as ranks."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def _with_hyphens(argv: Sequence[str]) -> list[str]:
    """torchrun takes `--nproc_per_node` too. What follows the command's `--` stays as it is."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    words = []
    for word in argv[:end]:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words + list(argv[end:])


def _command(words: Sequence[str]) -> list[str]:
    words = list(words[1:] if words[:1] == ["--"] else words)
    if words[:1] and words[0] in _OURS:
        return [sys.executable, "-m", "train", *words]
    if words and (words[0].endswith(".py") or words[0] == "-m"):
        return [sys.executable, *words]
    return words


def _misplaced(found: argparse.Namespace, nnodes: int) -> list[str]:
    problems = []
    if not 1 <= nnodes <= _MOST_HOSTS:
        problems.append(f"--nnodes {nnodes} must be from 1 to {_MOST_HOSTS}")
    if found.standalone and found.nnodes != 1:
        problems.append(f"--standalone and --nnodes {found.nnodes} contradict each other: give one of them")
    if nnodes > 1 and found.node_rank is None:
        problems.append(f"--node-rank is missing: this host's number, 0 to {nnodes - 1}, another one on each host")
    if nnodes > 1 and not found.master_addr:
        problems.append("--master-addr is missing: where the other hosts reach host 0")
    if nnodes >= 1 and found.node_rank is not None and not 0 <= found.node_rank < nnodes:
        problems.append(f"--node-rank {found.node_rank} must be from 0 to {nnodes - 1}, the number of hosts less 1")
    return problems


def is_name(run_id: str) -> bool:
    """Whether a run's name is that of a folder within the runs folder, and not a way out of it."""
    return run_id not in (".", "..") and not any(letter in "/\0" or ord(letter) < 32 for letter in run_id)


def _slots(text: str, nnodes: int, env: Mapping[str, str], problems: list[str]) -> list[int]:
    if text in ("gpu", "auto"):
        count = _gpus(env)
        if not count and text == "gpu":
            problems.append(
                "--nproc-per-node gpu: this host shows no GPU (no /dev/nvidia0, CUDA_VISIBLE_DEVICES unset)"
            )
        return [count or 1] * nnodes
    try:
        slots = [int(part) for part in text.split(",")]
    except ValueError:
        problems.append(f"--nproc-per-node {text!r} must be a number, one number for each host (4,2), or gpu")
        return []
    if len(slots) > 1 and len(slots) != nnodes:
        problems.append(f"--nproc-per-node {text} has {len(slots)} numbers for {nnodes} hosts: one, or one for each")
    if any(not 1 <= count <= _MOST_RANKS for count in slots):
        problems.append(f"--nproc-per-node {text}: from 1 to {_MOST_RANKS} ranks a host")
    return slots * nnodes if len(slots) == 1 else slots


def _gpus(env: Mapping[str, str]) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _plan(found: argparse.Namespace, nnodes: int, slots: list[int], problems: list[str]) -> Plan | None:
    names = found.hosts.split(",") if found.hosts else [f"node{index}" for index in range(nnodes)]
    if len(names) != nnodes:
        problems.append(f"--hosts {found.hosts} has {len(names)} names for {nnodes} hosts")
        return None
    master = (found.master_addr or "127.0.0.1").removeprefix("[").removesuffix("]")  # IPv6, as in addresses with ports
    addresses = [master, *names[1:]]
    if nnodes > 1 and is_loopback(master) and found.node_rank == 0:
        # Host 0 may be known by a name that means itself there (Debian's 127.0.1.1); as an address it will not do.
        problems.append(f"--master-addr {master} means each host itself: give an address that the others can reach")
        return None
    port = found.master_port
    if port is None:
        port = DEFAULT_PORT if nnodes > 1 else port_candidates(secrets.token_hex(8), 1)[0]
    hosts = [Host(*host) for host in zip(names, addresses, slots, strict=True)]
    try:
        return make_plan(hosts, run_id=found.run_id, master_port=port, control_port=found.control_port)
    except UsageError as error:
        problems += error.problems
        return None


def _secret(from_stdin: bool, env: Mapping[str, str], problems: list[str]) -> bytes:
    """The job's secret; never shown, and not passed on to ranks."""
    if from_stdin:
        secret = _line_of_stdin().strip()
        source = "the first line of standard input"
    elif not env.get(SECRET_FILE):
        problems.append(
            f"agents on several hosts need a secret: put the same file on all of them and name it in {SECRET_FILE} "
            "(head -c 32 /dev/urandom | base64 > secret; chmod 600 secret)"
        )
        return b""
    else:
        source = f"{SECRET_FILE}={env[SECRET_FILE]}"
        try:
            path = Path(env[SECRET_FILE])
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                problems.append(f"{source} can be read by others: chmod 600 {path}")
            secret = path.read_bytes().strip()
        except OSError as error:
            problems.append(f"{source} cannot be read: {error.strerror}")
            return b""
    if len(secret) < _SHORTEST_SECRET:
        problems.append(f"the secret in {source} is {len(secret)} bytes long: at least {_SHORTEST_SECRET} are needed")
    return secret


def _line_of_stdin() -> bytes:
    """The first line, and not a byte more: the rest is not ours."""
    line = b""
    while len(line) < 4096 and not line.endswith(b"\n"):
        try:
            byte = os.read(0, 1)
        except OSError:  # it is closed
            break
        if not byte:
            break
        line += byte
    return line


def _can_end(descriptor: int) -> bool:
    """Whether somebody holds the other end, and may let go of it."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def _nested(env: Mapping[str, str]) -> list[str]:
    """An agent starts all ranks of its host; a launcher that starts several agents there is a misunderstanding."""
    for name, launcher, fix in (
        ("SLURM_LOCALID", "srun", "srun --ntasks-per-node=1"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "mpirun", "mpirun --map-by ppr:1:node"),
        ("LOCAL_RANK", "torchrun", "the agent in place of torchrun"),
    ):
        if env.get(name, "0") not in ("0", "") and (name != "SLURM_LOCALID" or env.get("SLURM_STEP_ID")):
            return [
                f"{launcher} starts more than one agent on this host ({name}={env[name]}), but one agent starts all of "
                f"its ranks: use {fix} and --nproc-per-node"
            ]
    return []
