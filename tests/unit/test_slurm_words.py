"""The one command line that starts a job under Slurm, whole, for each runtime; and what a host's task does with it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, clean_environment
from train.errors import UsageError
from train.launch import options, slurm, slurm_facts
from train.launch.topology import Host, make_plan

GOLDEN = Path(__file__).parent / "golden" / "slurm.txt"
IMAGES = {
    "pyxis": "registry.example.org#team/muster:cuda", "apptainer": "/images/muster.sif", "docker": "muster:cuda",
    "podman": "muster:cuda", "venv": "muster:cuda",
}  # fmt: skip
AWKWARD = [
    "run",
    "--config",
    "ddp",
    "--data.paths",
    "[a b.txt]",
    "it's",
    'a "quote"',
    "$(touch x)",
    "--",
    "{node_rank}",
]


def job(runtime: str, device: str = "cuda", counts: tuple[int, ...] = (2, 2), **more: Any) -> slurm.Job:
    hosts = [Host(f"node{i + 1}", f"node{i + 1}", count) for i, count in enumerate(counts)]
    return slurm.Job(
        plan=make_plan(hosts, run_id="slurm-7"), run_id="slurm-7", cpus=8, gpus=counts, runtime=runtime,
        root="/opt/muster", runs_dir="/scratch/my runs", work_dir="/home/me/job", device=device, image=IMAGES[runtime],
        python="/opt/muster/venv/bin/python", limit_s=3595.0, name="slurm-7-0", user="1000:1000",
        variables={"NCCL_DEBUG": "INFO"}, **more,
    )  # fmt: skip


def golden() -> str:
    """What the golden file should be: a word a line, but for the script in the middle: that is tested by running it."""
    blocks = []
    for runtime in slurm.RUNTIMES:
        for device in ("cuda", "cpu"):
            words = slurm.srun_words(job(runtime, device), ["run", "--config", "ddp", "--optim.lr", "1e-3"])
            words[words.index(slurm.IN_STEP.strip())] = "<IN_STEP>"
            blocks.append(f"# {runtime}, {device}\n" + "".join(f"{shlex.quote(word)}\n" for word in words))
    return "\n".join(blocks)


def test_the_command_line_of_each_runtime_is_that_of_the_golden_file() -> None:
    now = golden()
    if not GOLDEN.exists() or GOLDEN.read_text(encoding="utf-8") != now:
        fresh = GOLDEN.with_suffix(".new")
        fresh.write_text(now, encoding="utf-8")
        pytest.fail(f"the command lines have changed; if that is meant: mv {fresh} {GOLDEN}")


@pytest.mark.parametrize("runtime", slurm.RUNTIMES)
def test_the_agent_understands_its_words_and_the_ranks_get_theirs_untouched(runtime: str) -> None:
    words = slurm.srun_words(job(runtime, counts=(2, 4)), AWKWARD)
    at = words.index("node", words.index("train"))
    told = ["1" if word == "{node_rank}" else word for word in words[at + 1 : words.index("--", at)]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "_line_of_stdin", lambda: b"x" * 44)
        patch.setattr(options, "_can_end", lambda descriptor: True)
        found = options.parse([*told, "--", *words[words.index("--", at) + 1 :]], {})
    assert found.node_rank == 1
    assert [host.slots for host in found.terms.plan.hosts] == [2, 4]
    assert found.run_id == "slurm-7"
    assert str(found.runs_dir) == "/scratch/my runs"
    assert found.terms.time_limit_s == 3595
    assert list(found.terms.command[-7:]) == AWKWARD[3:]
    assert found.terms.command[-9:-7] == ("--runtime.device", "cuda")


def test_what_is_not_ours_is_told_no_device() -> None:
    assert slurm.srun_words(job("venv"), ["python", "x.py"])[-2:] == ["python", "x.py"]


def test_containers_see_what_the_job_has() -> None:
    words = slurm.srun_words(job("docker"), ["run"])
    assert "MUSTER_GPUS=2" in words
    assert "MUSTER_GPUS=2" not in slurm.srun_words(job("docker", counts=(2, 4)), ["run"])  # hosts differ
    assert words[words.index("NCCL_DEBUG") - 1] == "--env", "its value comes from the environment of the client"
    assert "--gpus" not in slurm.srun_words(job("docker", "cpu"), ["run"])


class TestInStep:
    """The script around the agent, by whatever `sh` is here."""

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        command = ["sh", "-c", slurm.IN_STEP.strip(), "muster", *words]
        return subprocess.Popen(
            command, env={**clean_environment(), **env}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def said(self, *words: str, **env: str) -> list[str]:
        show = "import json, sys; print(json.dumps(sys.argv[1:]))"
        process = self.start(sys.executable, "-c", show, *words, **env)
        out = process.communicate()[0]
        assert process.returncode == 0
        return list(__import__("json").loads(out))

    def test_values_of_this_host_are_put_in_before_the_ranks_words_only(self) -> None:
        before = ["--node-rank", "{node_rank}", "x-{node_rank}", "a b", "$(touch x)", "it's", ""]
        assert self.said(*before, "--", *before, "--", "{node_rank}", SLURM_NODEID="3") == [
            "--node-rank", "3", "x-3", "a b", "$(touch x)", "it's", "", "--", *before, "--", "{node_rank}",
        ]  # fmt: skip

    def test_devices_are_those_of_the_step(self) -> None:
        assert self.said("--gpus", "{docker_gpus}", SLURM_JOB_GPUS="2,3") == ["--gpus", '"device=2,3"']
        assert self.said("{podman_gpus}", "x", SLURM_STEP_GPUS="4,5", SLURM_JOB_GPUS="2,3") == [
            "--device", "nvidia.com/gpu=4", "--device", "nvidia.com/gpu=5", "x",
        ]  # fmt: skip
        (cpus,) = self.said("{cpus}")
        assert len(os.sched_getaffinity(0)) == sum(
            int(part.split("-")[-1]) - int(part.split("-")[0]) + 1 for part in cpus.split(",")
        )

    def test_standard_input_reaches_the_agent(self) -> None:
        process = self.start(sys.executable, "-c", "print(input())")
        assert process.communicate("a secret\n")[0] == "a secret\n"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
    def test_signals_are_passed_on_and_the_agents_own_code_comes_out(self, number: signal.Signals) -> None:
        waits = "import signal, sys; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75)); print('up', flush=True)\n"
        process = self.start(sys.executable, "-c", waits + "while True: signal.pause()")
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        began_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == 75
        assert time.monotonic() - began_s > 2.5  # the other hosts' agents have time to end by themselves

    def test_an_agent_that_was_killed_is_no_success(self) -> None:
        process = self.start("sh", "-c", "kill -9 $$")
        assert process.wait(60) == 128 + 9


ENV = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    "SLURM_TASKS_PER_NODE": "1(x3)", "MUSTER_RUN_ID": "slurm-7", "MUSTER_RUNS_DIR": "/runs", "MUSTER_RUNTIME": "docker",
}  # fmt: skip
SHOWN = """JobId=7 JobName=x
   RunTime=00:00:01 TimeLimit=01:00:00 TimeMin=N/A
   StartTime=2022-02-01T10:00:00 EndTime=2022-02-01T11:00:00 Deadline=N/A
     Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:tesla:4(IDX:0-3)
     Nodes=node3 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0,2),shard:1(IDX:0)
"""


def test_ranks_are_gpus_of_each_host_else_tasks_else_what_was_said() -> None:
    def slots(ranks: str | None = None, shown: str = SHOWN, **env: str) -> list[int]:
        return [host.slots for host in slurm.job_of({**ENV, **env}, "/opt/muster", ranks, shown).plan.hosts]

    assert slots() == [1, 1, 1]
    assert slots(SLURM_TASKS_PER_NODE="2(x2),1") == [2, 2, 1]
    assert slots(SLURM_TASKS_PER_NODE="2(x3)", SLURM_NTASKS="5") == [2, 2, 1]  # as Slurm 22.05 has it
    assert slots(SLURM_TASKS_PER_NODE="4(x3)", SLURM_NTASKS="5") == [3, 1, 1]
    assert slots(SLURM_TASKS_PER_NODE="2(x3)", SLURM_NTASKS="6") == [2, 2, 2]
    assert slots(SLURM_GPUS_ON_NODE="4") == [4, 4, 2]
    assert slots(SLURM_GPUS_ON_NODE="4", shown="") == [4, 4, 4]
    assert slots("1", SLURM_GPUS_ON_NODE="4") == [1, 1, 1]
    assert slots(SLURM_GPUS_ON_NODE="4", MUSTER_NPROC="3") == [3, 3, 3]
    assert slots(MUSTER_NPROC="3(x2),1") == [3, 3, 1]


def test_a_job_takes_the_cores_that_all_its_hosts_have_and_knows_its_end() -> None:
    found = slurm.job_of(ENV, "/opt/muster", None, SHOWN)
    assert found.cpus == 4
    assert found.device == "cpu"
    assert found.ends_s == time.mktime((2022, 2, 1, 11, 0, 0, 0, 0, -1))
    assert slurm_facts.end_of({"SLURM_JOB_END_TIME": "5"}, SHOWN) == 5
    assert slurm_facts.end_of({}, SHOWN.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED")) is None
    assert slurm_facts.end_of({}, "") is None


def test_everything_that_is_wrong_is_told_at_once() -> None:
    bad = {"MUSTER_DEVICE": "tpu", "MUSTER_RUNTIME": "rkt", "MUSTER_NPROC": "2,2", "MUSTER_GRACE_S": "long"}
    with pytest.raises(UsageError) as caught:
        slurm.job_of({**ENV, **bad}, "/opt/muster", None, SHOWN)
    said = "\n".join(caught.value.problems)
    for words in ("MUSTER_DEVICE='tpu'", "MUSTER_RUNTIME='rkt' must be one of pyxis", "2 numbers for 3", "'long'"):
        assert words in said
    with pytest.raises(UsageError, match="node3 has no GPU of this job"):
        slurm.job_of({**ENV, "SLURM_GPUS_ON_NODE": "4"}, "/", None, SHOWN.replace("gpu:2(IDX:0,2),", ""))
    with pytest.raises(UsageError, match="submit it with sbatch"):
        slurm.job_of({}, "/", None, "")


def test_two_jobs_of_one_run_have_containers_of_their_own() -> None:
    def name(**env: str) -> str:
        words = slurm.srun_words(slurm.job_of({**ENV, **env}, "/opt/muster", None, SHOWN), ["run"])
        return words[words.index("--name") + 1]

    same = {"MUSTER_RUN_ID": "mine"}
    names = [name(**same), name(**same, SLURM_JOB_ID="8"), name(**same, SLURM_RESTART_COUNT="1")]
    names += [name(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="7"), name(SLURM_JOB_ID="77")]
    assert len(set(names)) == 5
    assert all(re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", text.replace("{node_rank}", "0")) for text in names)


@pytest.mark.parametrize(
    ("runtime", "runs_dir", "is_refused"),
    [
        *((runtime, "/a b/it's", False) for runtime in slurm.RUNTIMES),
        *((runtime, "/a:b", runtime != "venv") for runtime in slurm.RUNTIMES),
        *((runtime, "/a,b", runtime in ("pyxis", "apptainer")) for runtime in slurm.RUNTIMES),
    ],
)
def test_folders_that_a_container_cannot_have_are_refused(
    runtime: str, runs_dir: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    env = {**ENV, "MUSTER_RUNTIME": runtime, "MUSTER_IMAGE": "x"}
    for_runs, for_folder = {**env, "MUSTER_RUNS_DIR": runs_dir}, tmp_path / runs_dir[1:]
    for_folder.mkdir(parents=True)
    if not is_refused:
        assert slurm.job_of(for_runs, str(tmp_path), None, SHOWN).runs_dir == runs_dir
        return
    with pytest.raises(UsageError, match=f"MUSTER_RUNS_DIR: '{runs_dir}' has a '{runs_dir[2]}' in its name"):
        slurm.job_of(for_runs, str(tmp_path), None, SHOWN)
    monkeypatch.chdir(for_folder)
    with pytest.raises(UsageError, match=rf"this folder: '.*{runs_dir}' has a "):
        slurm.job_of(env, str(tmp_path), None, SHOWN)


def test_mounts_are_pairs_of_folders() -> None:
    def mounts(text: str) -> tuple[str, ...]:
        return slurm.job_of({**ENV, "MUSTER_MOUNTS": text}, "/opt/muster", None, SHOWN).mounts

    assert mounts("") == ()
    assert mounts("/data:/data,/a b:/models:ro,name:/cache") == ("/data:/data", "/a b:/models:ro", "name:/cache")
    for wrong in ("/data", "/data:data", ":/data", "/data:/a:ro:x"):
        with pytest.raises(UsageError, match=f"MUSTER_MOUNTS: '{wrong}' must be such as"):
            mounts(f"/x:/x,{wrong}")


@pytest.mark.parametrize(
    ("script", "env", "lead_s"),
    [
        ("#SBATCH --signal=B:USR2@150   # why\n", "", 150),
        ("#SBATCH --time=1\n#SBATCH --signal B:SIGUSR2@60\n", "", 60),
        ("#SBATCH --signal=B:USR2@150\n", "B:USR2@330", 330),
        ("#SBATCH --signal=B:TERM@150\n", "", None),
        ("# SBATCH --signal=B:USR2@150\n", "", None),
        ("#SBATCH --signal=USR2\n", "", None),
        ("", "", None),
    ],
)
def test_how_long_before_its_limit_a_script_is_signalled(script: str, env: str, lead_s: int | None) -> None:
    assert slurm_facts.lead_of({"SBATCH_SIGNAL": env}, script) == lead_s


def test_the_runtime_is_found_by_what_is_there(tmp_path: Path) -> None:
    def runtime(**env: str) -> tuple[str, str]:
        env = {**{k: v for k, v in ENV.items() if k != "MUSTER_RUNTIME"}, **env}
        found = slurm.job_of(env, str(tmp_path), None, SHOWN)
        return found.runtime, found.image

    assert runtime(MUSTER_IMAGE="/x.sif")[0] == "apptainer"
    assert runtime(MUSTER_IMAGE="/x.sqsh")[0] == "pyxis"
    assert runtime(MUSTER_RUNTIME="docker", MUSTER_DEVICE="cuda") == ("docker", "muster:cuda")
    with pytest.raises(UsageError, match="needs MUSTER_IMAGE"):
        runtime(MUSTER_RUNTIME="pyxis")
    with pytest.raises(UsageError, match=f"no bin/python in {tmp_path}/venv"):
        runtime(MUSTER_RUNTIME="venv")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert runtime()[0] == "venv"


def test_what_the_batch_script_calls_needs_no_package_and_no_new_python() -> None:
    """Compute nodes' own Python may be old: Red Hat 9 has 3.9."""
    import ast

    for name in ("slurm", "slurm_after", "slurm_check", "slurm_facts"):
        show = "print([name for name in sys.modules if name.split('.')[0] in ('yaml', 'torch', 'hostlist')])"
        words = [sys.executable, "-S", "-c", f"import sys, train.launch.{name}; {show}"]
        assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"
        ast.parse((ROOT / f"train/launch/{name}.py").read_text(), feature_version=(3, 9))
    for name in ("launch/topology", "seam", "errors", "slurm_lists"):
        ast.parse((ROOT / f"train/{name}.py").read_text(), feature_version=(3, 9))
