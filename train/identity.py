"""Who this process is, and until when: the only reader of RANK, WORLD_SIZE, SLURM_* and OMPI_*.

Free of torch: a bad environment is refused before torch takes its second to load.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train.errors import UsageError
from train.options import LaunchOptions
from train.seam import DEADLINE, STATUS_PAGE
from train.slurm_lists import expand_counts, expand_hosts

DEFAULT_PORT = 29500  # the tutorial's and torchrun's own


@dataclass(frozen=True)
class Identity:
    """One rank's place in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    """Index on this host; None where nothing says it."""
    local_world_size: int | None = None
    """Ranks on this host; None where nothing says it."""
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "alone"

    @property
    def spans_hosts(self) -> bool:
        """Whether some ranks are known to be on another host."""
        return self.local_world_size is not None and self.local_world_size < self.world_size


def identify(options: LaunchOptions, env: Mapping[str, str]) -> Identity:
    """Who am I: flags, then torchrun's variables, Slurm's, Open MPI's; none of them: alone.

    The first complete family wins and silences the later ones. Raises UsageError for a half-set family
    with no complete one before it, for flags that contradict the environment, and for impossible values.
    """
    for is_present, read in _FAMILIES:
        if is_present(options, env):
            me = read(options, env)
            if options.local_rank is not None:
                me = _with_local_rank(me, options.local_rank, env)
            _refuse_impossible(me)
            return me
    if options.local_rank is not None:
        raise UsageError(f"--local-rank {options.local_rank} was given without --rank and --world-size: give all three")
    return Identity()


def _with_local_rank(me: Identity, local_rank: int, env: Mapping[str, str]) -> Identity:
    """`--local-rank`, as torch.distributed.launch passes it beside its variables. Raises UsageError."""
    if me.local_rank is not None and me.local_rank != local_rank:
        name = next(name for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK") if env.get(name))
        raise UsageError(
            f"--local-rank {local_rank} contradicts {name}={env[name]} in the environment: give one of them"
        )
    return dataclasses.replace(me, local_rank=local_rank)


def _from_flags(options: LaunchOptions, env: Mapping[str, str]) -> Identity:
    flags = {
        "--rank": (options.rank, "RANK"),
        "--world-size": (options.world_size, "WORLD_SIZE"),
        "--master-addr": (options.master_addr, "MASTER_ADDR"),
        "--master-port": (options.master_port, "MASTER_PORT"),
    }
    problems = [
        f"{flag} {value} contradicts {name}={env[name]} in the environment: give one of them"
        for flag, (value, name) in flags.items()
        if value is not None and env.get(name) and str(value) != env[name]
    ]
    master_addr = options.master_addr or env.get("MASTER_ADDR")
    missing = [flag for flag in ("--rank", "--world-size") if flags[flag][0] is None]
    if master_addr is None and options.world_size != 1:
        missing.append("--master-addr")
    if missing and not problems:
        shown = " ".join(f"{flag} {value}" for flag, (value, _) in flags.items() if value is not None)
        problems.append(f"{shown} was given without {', '.join(missing)}: give all of them to every rank")
    if problems:
        raise UsageError(problems)
    assert options.rank is not None and options.world_size is not None
    port = _optional(env, "MASTER_PORT") or DEFAULT_PORT if options.master_port is None else options.master_port
    return Identity(
        rank=options.rank,
        world_size=options.world_size,
        local_rank=_optional(env, "LOCAL_RANK"),
        master_addr=master_addr,
        master_port=port,
        source="flags",
    )


def _from_torchrun(options: LaunchOptions, env: Mapping[str, str]) -> Identity:
    needed = ["RANK", "WORLD_SIZE"]
    if env.get("WORLD_SIZE") != "1":
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    _refuse_half_set("torchrun", env, needed, also=["LOCAL_RANK"])
    _refuse_words(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    return Identity(
        rank=_number(env, "RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_rank=_optional(env, "LOCAL_RANK"),
        local_world_size=_optional(env, "LOCAL_WORLD_SIZE"),
        master_addr=env.get("MASTER_ADDR"),
        master_port=_optional(env, "MASTER_PORT"),
        source="agent" if env.get(STATUS_PAGE) else "torchrun",
    )


def _from_slurm(options: LaunchOptions, env: Mapping[str, str]) -> Identity:
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")  # the step's first host has rank 0
    needed = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"]
    _refuse_half_set("slurm", env, needed if hosts else [*needed, "SLURM_JOB_NODELIST"])
    assert hosts is not None
    job = f"slurm {env.get('SLURM_JOB_ID')} {env.get('SLURM_STEP_ID')} {env.get('SLURM_RESTART_COUNT')}"
    return Identity(
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_NTASKS"),
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_here(env),
        master_addr=first_host(hosts),
        master_port=port_of(job),
        source="slurm",
    )


def _from_mpirun(options: LaunchOptions, env: Mapping[str, str]) -> Identity:
    _refuse_half_set("mpirun", env, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
    world_size = _number(env, "OMPI_COMM_WORLD_SIZE")
    local_world_size = _optional(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    one_host = local_world_size == world_size
    master_addr = env.get("MASTER_ADDR") or ("127.0.0.1" if one_host else None)
    if master_addr is None:
        raise UsageError(
            f"mpirun started {world_size} ranks on more than one host but does not say where rank 0 is: "
            "add -x MASTER_ADDR=<host of rank 0>"
        )
    job = "mpirun " + (env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "")
    return Identity(
        rank=_number(env, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=_optional(env, "MASTER_PORT") or port_of(job),
        source="mpirun",
    )


def _flags_present(options: LaunchOptions, env: Mapping[str, str]) -> bool:
    flags = (options.rank, options.world_size, options.master_addr, options.master_port)
    return any(flag is not None for flag in flags)


def _any_of(*names: str) -> Callable[[LaunchOptions, Mapping[str, str]], bool]:
    return lambda options, env: any(env.get(name) for name in names)  # Compose sets ${RANK} to nothing


_FAMILIES = (
    (_flags_present, _from_flags),
    (_any_of("RANK", "WORLD_SIZE", "LOCAL_RANK"), _from_torchrun),
    (_any_of("SLURM_STEP_ID"), _from_slurm),  # the batch script has SLURM_PROCID too, but only a step has ranks
    (_any_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _from_mpirun),
)


def _refuse_half_set(source: str, env: Mapping[str, str], needed: list[str], also: list[str] | None = None) -> None:
    missing = [name for name in needed if not env.get(name)]
    if missing:
        present = [name for name in [*needed, *(also or [])] if env.get(name)]
        shown = ", ".join(f"{name}={env[name]}" for name in present)
        raise UsageError(
            f"the environment is half set ({source}): {shown} without {', '.join(missing)}; "
            f"set what is missing, or unset {', '.join(present)}"
        )


def _refuse_impossible(me: Identity) -> None:
    problems = []
    if me.world_size < 1:
        problems.append(f"world size {me.world_size} ({me.source}) must be at least 1")
    elif not 0 <= me.rank < me.world_size:
        problems.append(f"rank {me.rank} ({me.source}) must be from 0 to {me.world_size - 1}, the world size less 1")
    elif me.local_rank is not None and not 0 <= me.local_rank < (me.local_world_size or me.world_size):
        last = (me.local_world_size or me.world_size) - 1
        problems.append(f"local rank {me.local_rank} ({me.source}) must be from 0 to {last}")
    if me.master_port is not None and not 0 < me.master_port < 65536:
        problems.append(f"master port {me.master_port} ({me.source}) must be from 1 to 65535")
    # On rank 0's own host its name may well be 127.0.1.1 (Debian's /etc/hosts); anywhere else that is a mistake.
    if me.spans_hosts and me.rank >= (me.local_world_size or 0) and me.master_addr and is_loopback(me.master_addr):
        problems.append(
            f"master address {me.master_addr} ({me.source}) is this host itself, but the {me.world_size} ranks are on "
            "more than one host: give an address of rank 0's host that the others can reach"
        )
    if problems:
        raise UsageError(problems)


def _refuse_words(env: Mapping[str, str], *names: str) -> None:
    problems = []
    for name in names:
        try:
            _optional(env, name)
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} in the environment must be a whole number") from None


def _optional(env: Mapping[str, str], name: str) -> int | None:
    return _number(env, name) if env.get(name) else None


def _slurm_tasks_here(env: Mapping[str, str]) -> int | None:
    """This node's tasks, from `SLURM_STEP_TASKS_PER_NODE` such as `2(x3),1` (srun(1), OUTPUT ENVIRONMENT)."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    counts = expand_counts(text) if text else []
    node = _optional(env, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None


def first_host(hosts: str) -> str:
    """First host of a Slurm host list: `rack[1-2]node[08,3]` is `rack1node08`. Raises UsageError."""
    try:
        return expand_hosts(hosts)[0]
    except UsageError as error:
        raise UsageError(f"{error}; give --rank and the like") from None


def stable_run_id(env: Mapping[str, str]) -> str | None:
    """A run's name that survives Slurm's requeues: from the job's or the array task's id."""
    if env.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm-{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return f"slurm-{env['SLURM_JOB_ID']}" if env.get("SLURM_JOB_ID") else None


def port_of(job: str) -> int:
    """A port that follows from the job's name, below the range that systems hand out to clients (32768 up)."""
    return 20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10000


def is_loopback(address: str) -> bool:
    """Whether a name or address means this very host."""
    try:
        found = str(socket.getaddrinfo(address, None)[0][4][0])
    except (OSError, UnicodeError):  # UnicodeError: no name that could be looked up
        return False
    return found == "::1" or found.startswith("127.")


def time_is_up_s(env: Mapping[str, str]) -> float | None:
    """On the monotonic clock: the earlier of an agent's time limit and the end of the Slurm job; None: no limit.

    Raises UsageError where a variable holds no number.
    """
    # Slurm's is a time of day (`SLURM_JOB_END_TIME`, sbatch(1)); an agent's is of the monotonic clock already.
    offsets = {DEADLINE: 0.0, "SLURM_JOB_END_TIME": time.monotonic() - time.time()}
    found = []
    for name, offset in offsets.items():
        if env.get(name):
            try:
                found.append(float(env[name]) + offset)
            except ValueError:
                raise UsageError(f"{name}={env[name]!r} is no number of seconds: unset it") from None
    return min(found, default=None)
