"""A Slurm job → the words of the one `srun` that starts an agent on each of its hosts, in whatever runtime.

Called by slurm/common.sh on the job's first host, with the Python of that host: standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from train.errors import UsageError
from train.launch.slurm_facts import end_of, gpus_of, is_own_disk, job_name, lead_of, output
from train.launch.topology import Host, Plan, make_plan
from train.seam import Exit
from train.slurm_lists import expand_counts, expand_hosts

RUNTIMES = ("pyxis", "apptainer", "docker", "podman", "venv")
IN_IMAGE = "/opt/muster"
GRACE_S = 120
"""To end the step and save; the scripts' `--signal=B:USR2@150` leaves this and half a minute."""
NEEDED_S = 30
"""After the grace: to leave, and for Slurm, whose signal may also come late."""
LEAVING_S = 5
"""Before the time limit the agents' own one ends: they count from a little later."""
SHM_MB = 1024
PASSED_ON = re.compile(r"(NCCL|GLOO|TORCH|OMP|UCX|FI|CUDA_DEVICE|SLURM_JOB|SLURM_ARRAY|HF|WANDB)_|SLURM_RESTART_COUNT$")
"""Variables of the job that also count within a container that starts with none: docker and podman."""
NOT_PASSED_ON = ("SLURM_JOB_GPUS", "MUSTER_SECRET_FILE")

IN_STEP = r"""
ended='' asked='' agent=''
for word do shift
  [ -n "$ended" ] || case $word in
    --) ended=yes ;;
    *{node_rank}) word=${word%?node_rank?}$SLURM_NODEID ;;
    {cpus}) word=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status) ;;
    {docker_gpus}) word=\"device=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS-}}\" ;;
    {podman_gpus}) for gpu in $(echo "${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS-}}" | tr , ' '); do
        set -- "$@" --device "nvidia.com/gpu=$gpu"; done; continue ;;
  esac
  set -- "$@" "$word"
done
trap 'asked=yes; kill -s USR2 $agent' TERM USR2
exec 3<&0
"$@" <&3 3<&- &
agent=$!
[ -z "$asked" ] || kill -s USR2 $agent
while wait $agent; code=$?; kill -0 $agent 2>/dev/null; do :; done
[ "$code" -le 128 ] || { wait $agent; again=$?; [ $again = 127 ] || code=$again; }
[ "$code" = 0 ] || sleep 3
exit "$code"
"""
"""What a host's task does around its agent. Values that differ between hosts are put in here, not in the batch script.
Signals are passed on, where control groups hold a job and Slurm signals this process alone; as USR2, for elsewhere the
agent gets SIGTERM itself, and would take the second for impatience. After a failure it waits for
the other hosts' agents, which end by themselves and say why: srun kills them at the first bad exit that it sees."""


@dataclass(frozen=True)
class Job:
    """What Slurm gave us, and what the user asked for."""

    plan: Plan
    run_id: str
    cpus: int
    """Cores of the job on each host; the least of them where they differ."""
    gpus: tuple[int, ...]
    """GPUs of the job on each host."""
    runtime: str
    root: str
    """The checkout: the folder that holds `train/`, at the same path on all hosts."""
    runs_dir: str
    work_dir: str
    device: str
    image: str = ""
    python: str = ""
    """Of the virtual environment."""
    ends_s: float | None = None
    """When the time limit ends, in seconds since 1970."""
    limit_s: float | None = None
    grace_s: int = GRACE_S
    lead_s: int | None = None
    """How long before the limit the batch script is signalled, as far as it can be seen."""
    name: str = "muster"
    """Of containers: another one for each start of each job, for two jobs may have one run."""
    user: str = "0:0"
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """More of the runtime's own options."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """To be passed on into containers that start with none."""


def srun_words(job: Job, command: Sequence[str]) -> list[str]:
    """The whole command line, `srun` included, that starts the agents, and they the ranks with this command."""
    hosts = len(job.plan.hosts)
    export = "ALL"
    if job.runtime == "pyxis":
        # enroot's PyTorch hook, in an image with PYTORCH_VERSION, makes up what is not set: a port that may be taken.
        export += f",MASTER_ADDR={job.plan.master_addr},MASTER_PORT={job.plan.master_ports[0]}"
    words = [
        "srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1", f"--cpus-per-task={job.cpus}",
        "--kill-on-bad-exit=1", "--wait=60", "--label", "--mpi=none", f"--export={export}",
    ]  # fmt: skip
    options = [word.replace("{image}", job.image) for word in _SRUN_OPTIONS.get(job.runtime, ())]
    if job.runtime == "pyxis":
        options += [f"--container-mounts={','.join(_mounts(job))}", f"--container-workdir={job.work_dir}", *job.options]
    if command[:1] == ["preflight"]:
        inner = _preflight(job, command[1:])
    else:
        inner = [*_agent(job), "--", *_with_device(job, command)]
    return [*words, *options, "sh", "-c", IN_STEP.strip(), "muster", *_around(job), *inner]


_SRUN_OPTIONS = {"pyxis": ("--container-image={image}", "--no-container-entrypoint")}


def _around(job: Job) -> list[str]:
    """What stands before the agent's own words on each host: the container's client, or nothing but a Python."""
    cuda = job.device == "cuda"
    if job.runtime == "venv":
        return ["env", f"PYTHONPATH={job.root}", "PYTHONUNBUFFERED=1", job.python]
    inside = ["python"]
    checks = {"MUSTER_RUNS_DIR": job.runs_dir}
    if cuda and len(set(job.gpus)) == 1:
        checks["MUSTER_GPUS"] = str(job.gpus[0])
    if job.runtime == "pyxis":
        return ["env", "PYTHONNOUSERSITE=1", *(f"{k}={v}" for k, v in checks.items()), "entrypoint", *inside]
    if job.runtime == "apptainer":
        # The host's environment comes along: neither its Python paths nor packages of one's home belong in here.
        inner = {"PYTHONPATH": IN_IMAGE, "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", **checks}
        words = ["apptainer", "exec", *(["--nv"] if cuda else []), "--pwd", job.work_dir]
        words += [word for mount in _mounts(job) for word in ("--bind", mount)]
        words += [word for k, v in inner.items() for word in ("--env", f"{k}={v}")]
        return [*words, *job.options, job.image, "entrypoint", *inside]
    words = [
        job.runtime, "run", "--rm", "--interactive", "--name", f"{job.name}-{{node_rank}}", "--network", "host",
        "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",  # noqa: S108
        "--stop-timeout", str(job.grace_s), "--cpuset-cpus", "{cpus}",
        "--workdir", job.work_dir,
    ]  # fmt: skip
    if job.runtime == "docker":
        words += ["--pull", "never", "--user", job.user, *(["--gpus", "{docker_gpus}"] if cuda else [])]
    else:
        words += ["--pull", "never", "--userns", "keep-id", *(["{podman_gpus}"] if cuda else [])]
    words += ["--ipc", "host", "--ulimit", "memlock=-1"] if cuda else ["--shm-size", f"{SHM_MB}m"]
    checks |= {} if cuda else {"MUSTER_SHM_MB": str(SHM_MB - 24)}
    words += [word for mount in _mounts(job) for word in ("--volume", mount)]
    words += [word for k, v in checks.items() for word in ("--env", f"{k}={v}")]
    words += [word for name in job.variables for word in ("--env", name)]  # values, keys among them, are not for `ps`
    return [*words, *job.options, job.image, *inside]


def _mounts(job: Job) -> list[str]:
    """At the same paths within: the run folder's parent, and where the job was submitted."""
    own = [path for path in dict.fromkeys((job.runs_dir, job.work_dir)) if path not in ("/", "/tmp")]  # noqa: S108
    return [*(f"{path}:{path}" for path in own), *job.mounts]


def _agent(job: Job) -> list[str]:
    words = job.plan.node_arguments(0)
    words[words.index("--node-rank") + 1] = "{node_rank}"
    words = ["-m", "train", "node", *words, "--runs-dir", job.runs_dir, "--grace-s", str(job.grace_s)]
    if job.limit_s is not None:
        words += ["--time-limit-s", str(int(job.limit_s))]
    if len(job.plan.hosts) > 1:
        words.append("--secret-stdin")
    # The batch script asks to stop by ending standard input; a container whose client was killed ends by that, too.
    return [*words, "--die-with-stdin"]


def _preflight(job: Job, more: Sequence[str]) -> list[str]:
    """A host's part of a preflight, where an agent would be; slurm/common.sh has what all tell judged."""
    plan = json.dumps(job.plan.as_dict())
    words = ["-m", "train", "preflight", "--plan", plan, "--node-rank", "{node_rank}", "--secret-stdin"]
    return [*words, "--device", job.device, "--runs-dir", job.runs_dir, *more]


def _with_device(job: Job, command: Sequence[str]) -> list[str]:
    """Our own job is told where to train: a GPU that is missing ends it, in place of training slowly without."""
    words = list(command)
    if words[:2] == ["run", "--config"]:
        words[3:3] = ["--runtime.device", job.device]
    return words


def job_of(env: Mapping[str, str], root: str, ranks: str | None, shown: str, script: str = "") -> Job:
    """The job around this process. Raises UsageError with all that is wrong.

    Args:
        env: of the batch script.
        root: the checkout.
        ranks: a host's ranks, where the kind of job says it: 1.
        shown: `scontrol --details show job` of it.
        script: the batch script.
    """
    if not env.get("SLURM_JOB_NODELIST"):
        raise UsageError("this is no Slurm job: SLURM_JOB_NODELIST is not set; submit it with sbatch")
    problems: list[str] = []
    names = expand_hosts(env["SLURM_JOB_NODELIST"])
    cores = expand_counts(env.get("SLURM_JOB_CPUS_PER_NODE") or "1")
    gpus = gpus_of(names, env, shown)
    counts = _ranks(names, gpus, env, ranks, problems)
    device = env.get("MUSTER_DEVICE") or "auto"
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"MUSTER_DEVICE={device!r} must be auto, cpu or cuda")
    device = ("cuda" if any(gpus) else "cpu") if device == "auto" else device
    runtime, image, python = _runtime(env, root, device, problems)
    mounts = tuple(filter(None, (env.get("MUSTER_MOUNTS") or "").split(",")))
    work_dir = str(Path.cwd())
    if runtime != "venv":
        problems += _unmountable(runtime, {"MUSTER_RUNS_DIR": env["MUSTER_RUNS_DIR"], "this folder": work_dir}, mounts)
    grace_s = env.get("MUSTER_GRACE_S") or str(GRACE_S)
    if not grace_s.isdecimal():
        problems.append(f"MUSTER_GRACE_S={grace_s!r} must be a whole number of seconds")
    run_id = env["MUSTER_RUN_ID"]
    try:
        plan = make_plan([Host(name, name, count) for name, count in zip(names, counts)], run_id=run_id)  # noqa: B905
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    ends_s = end_of(env, shown)
    restarts = env.get("SLURM_RESTART_COUNT") or "0"
    return Job(
        plan=plan, run_id=run_id, cpus=min(cores), gpus=tuple(gpus), runtime=runtime, root=root, device=device,
        runs_dir=env["MUSTER_RUNS_DIR"], work_dir=work_dir, image=image, python=python, ends_s=ends_s,
        limit_s=None if ends_s is None else max(1.0, ends_s - time.time() - LEAVING_S), grace_s=int(grace_s),
        lead_s=lead_of(env, script), name=f"{run_id}-{env.get('SLURM_JOB_ID', '0')}-{restarts}",
        user=f"{os.getuid()}:{os.getgid()}", mounts=mounts,
        options=tuple((env.get("MUSTER_RUNTIME_OPTIONS") or "").split()),
        variables={k: v for k, v in sorted(env.items()) if PASSED_ON.match(k) and k not in NOT_PASSED_ON},
    )  # fmt: skip


def _unmountable(runtime: str, paths: Mapping[str, str], mounts: Sequence[str]) -> list[str]:
    """Folders whose names a container's client would take for something else: in a mount `:` and `,` are separators."""
    marks = ":" if runtime in ("docker", "podman") else ":,"
    problems = [
        f"{name}: {path!r} has a '{mark}' in its name, and no container of {runtime} can have it: use another folder"
        for name, path in paths.items() for mark in marks if mark in path
    ]  # fmt: skip
    wrong = [mount for mount in mounts if not re.fullmatch(r"[^:]+:/[^:]*(:[^:]+)?", mount)]
    return problems + [f"MUSTER_MOUNTS: {mount!r} must be such as /on/the/host:/in/the/container" for mount in wrong]


def _ranks(
    names: Sequence[str], gpus: Sequence[int], env: Mapping[str, str], ranks: str | None, problems: list[str]
) -> list[int]:
    """Ranks of each host: as many as were said, else as it has GPUs of the job, else tasks of the job."""
    sources = {"MUSTER_NPROC": env.get("MUSTER_NPROC"), "this script": ranks}
    source, text = next(((name, text) for name, text in sources.items() if text), ("SLURM_TASKS_PER_NODE", None))
    if text is None and any(gpus):
        if not all(gpus):
            without = ", ".join(name for name, count in zip(names, gpus) if not count)  # noqa: B905
            problems.append(f"{without} has no GPU of this job, other hosts have: ask with --gpus-per-node")
        return list(gpus)
    try:
        counts = expand_counts(text or env.get(source) or "1")
    except UsageError as error:
        problems += [f"{source}: {problem}" for problem in error.problems]
        return [1] * len(names)
    counts = counts * len(names) if len(counts) == 1 else counts
    if len(counts) != len(names):
        problems.append(f"{source}: {text or env.get(source)} has {len(counts)} numbers for {len(names)} hosts")
        return [1] * len(names)
    if text is None and len(names) <= int(env.get("SLURM_NTASKS") or 0) < sum(counts):
        # Slurm gives 2(x2) also for three tasks on two hosts of two: the last host has fewer.
        for host in reversed(range(len(names))):
            counts[host] -= min(counts[host] - 1, sum(counts) - int(env["SLURM_NTASKS"]))
    return counts


def _runtime(env: Mapping[str, str], root: str, device: str, problems: list[str]) -> tuple[str, str, str]:
    """Which runtime, its image, and the virtual environment's Python: as said, else as found on this host."""
    runtime, image = env.get("MUSTER_RUNTIME") or "", env.get("MUSTER_IMAGE") or ""
    python = _python(env, root)
    if not runtime and not image and python:
        runtime = "venv"
    elif not runtime:
        ends = {".sif": "apptainer", ".sqsh": "pyxis"}
        runtime = next((name for end, name in ends.items() if image.endswith(end)), "") or _container_runtime()
    if not runtime:
        problems.append(
            "there is nothing to run it with: no pyxis, apptainer, docker or podman on this host, and no Python "
            f"environment in {root}/venv or {root}/.venv; set MUSTER_VENV, or MUSTER_RUNTIME and MUSTER_IMAGE"
        )
    elif runtime not in RUNTIMES:
        problems.append(f"MUSTER_RUNTIME={runtime!r} must be one of {', '.join(RUNTIMES)}")
    elif runtime == "venv" and not python:
        problems.append(
            f"MUSTER_RUNTIME=venv, but there is no bin/python in {env.get('MUSTER_VENV') or root + '/venv'}"
        )
    elif runtime != "venv" and not image and runtime in ("pyxis", "apptainer"):
        problems.append(f"MUSTER_RUNTIME={runtime} needs MUSTER_IMAGE: a file (.sqsh, .sif) or a name in a registry")
    return runtime, image or f"muster:{device}", python


def _python(env: Mapping[str, str], root: str) -> str:
    given = env.get("MUSTER_VENV")
    folders = [given] if given else [f"{root}/venv", f"{root}/.venv", env.get("VIRTUAL_ENV", "")]
    return next((f"{folder}/bin/python" for folder in folders if folder and Path(folder, "bin/python").exists()), "")


def _container_runtime() -> str:
    """What this host has, the one made for clusters first."""
    if "--container-image" in output("srun", "--help"):
        return "pyxis"
    return next((name for name in ("apptainer", "docker", "podman") if shutil.which(name)), "")


def notes(job: Job) -> list[str]:
    """What a user should know of this job, each in a line."""
    counts = [host.slots for host in job.plan.hosts]
    each = f"{counts[0]} on each" if len(set(counts)) == 1 else ", ".join(map(str, counts))
    hosts = "one host" if len(counts) == 1 else f"{len(counts)} hosts ({each})"
    ranks = "1 rank" if job.plan.world_size == 1 else f"{job.plan.world_size} ranks"
    what = job.image if job.runtime != "venv" else job.python
    first = job.plan.hosts[0].name
    lines = [
        f"{ranks} on {hosts}, {job.cpus} cores a host, "
        f"{'GPUs' if job.device == 'cuda' else 'on CPUs'}; {job.runtime} {what}; "
        f"ranks meet at {first}, port {job.plan.master_ports[0]} or the next free one"
    ]
    if job.cpus < max(counts):
        lines.append(f"note: {max(counts)} ranks share {job.cpus} cores: give --cpus-per-task, cores of a whole host")
    if job.lead_s is not None and job.limit_s is not None and job.grace_s > job.lead_s - NEEDED_S:
        lines.append(
            f"note: MUSTER_GRACE_S={job.grace_s}, but the script is signalled {job.lead_s} s before the time limit: "
            f"give sbatch --signal=B:USR2@{job.grace_s + NEEDED_S} (where it has that, all is well), or set "
            f"MUSTER_GRACE_S={max(job.lead_s - NEEDED_S, 0)}"
        )
    if len(counts) > 1 and is_own_disk(job.runs_dir):
        lines.append(f"{job.runs_dir} is on each host's own disk: the one of {first}, rank 0's, counts")
    return lines


def main(argv: Sequence[str]) -> int:
    """`[--ranks N] COMMAND …`: print srun's words, each ended by a zero byte; words for people go to stderr."""
    words = list(argv)
    ranks = words[1] if words[:1] == ["--ranks"] else None
    command = words[2:] if ranks else words
    try:
        if not command:
            raise UsageError("what to run is missing: sbatch slurm/script.sbatch my_script.py --my-option 1")
        shown = output("scontrol", "--details", "show", "job", job_name(os.environ))
        script = Path(os.environ.get("MUSTER_SCRIPT") or os.devnull).read_text(encoding="utf-8", errors="replace")
        job = job_of(os.environ, os.environ["MUSTER_HOME"], ranks, shown, script)
    except UsageError as error:
        print(
            "muster: nothing was started:", *(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr
        )
        return int(Exit.USAGE)
    print(*(f"muster: {line}" for line in notes(job)), sep="\n", file=sys.stderr)
    sys.stdout.write("".join(f"{word}\0" for word in srun_words(job, command)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
