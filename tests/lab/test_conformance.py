"""All launchers are one: the same plan, ranks, bits, files and verdicts, whoever starts the job. Prints the table."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.container.cluster import Cluster as Compose
from tests.container.conftest import IMAGE
from tests.lab.cluster import need_lab
from tests.lab.slurms import NODES, Slurm, site
from tests.ranks import ROOT, weights_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first waits for its hosts

TRAINS = [
    "run", "--config", "ddp", "--model.name", "linear", "--data.name", "regression", "--train.eval_every", "0",
    "--train.tensorboard", "false", "--train.log_every", "1", "--train.steps", "20",
]  # fmt: skip
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS",
)  # fmt: skip
SHOWS = ["sh", "-c", 'echo "' + " ".join(f"{name}=${name}" for name in VARIABLES) + ' ."']
LOOP = "while :; do sleep 0.1; done"
CASES: dict[str, tuple[list[str], int]] = {
    "bad config": ([*TRAINS, "--optim.lrr", "1"], 2),
    "rank killed": (["sh", "-c", f"[ $RANK != 3 ] || kill -9 $$; {LOOP}"], 5),
    "stop request": (["sh", "-c", f'trap "exit 0" TERM; [ $RANK != 0 ] || kill -TERM $PPID; {LOOP}'], 75),
    "time limit": (["sh", "-c", f'trap "exit 0" TERM; {LOOP}'], 75),
}
LIMIT_S = 6
STILL_THERE = 124
"""Of a torchrun that had not ended a minute later: where one host's rank dies, the other host's torchrun waits on."""


@dataclass
class Outcome:
    """What became of a job."""

    code: int
    """Of what the user called."""
    output: str
    run: Path | None = None
    """Its run folder, brought here."""

    @property
    def verdict(self) -> int:
        """The job's exit code, by its verdict; by the last words where nothing was started."""
        if self.run is not None and (self.run / "verdict.json").exists():
            return int(json.loads((self.run / "verdict.json").read_text())["exit_code"])
        found = re.findall(r"\(exit code (\d+)", self.output)
        return int(found[-1]) if found else self.code


Way = Callable[[str, list[str], bool], Outcome]
"""A launcher: the run's name, the ranks' command (`run …` is Muster's own), whether with a time limit."""


@dataclass
class Ways:
    """The launchers, on one lab."""

    slurm: Slurm
    folder: Path
    compose: Compose
    table: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, Way]:
        return {
            "local agent": self.local, "fab": self.fab, "ansible": self.ansible, "slurm": self.sbatch,
            "torchrun": self.torchrun, "compose": self.docker_up,
        }  # fmt: skip

    def local(self, name: str, command: list[str], limit: bool) -> Outcome:
        words = ["-m", "train", "node", "--standalone", "--nproc-per-node", "4", "--run-id", name]
        words += ["--runs-dir", "/tmp/local", *(["--time-limit-s", str(LIMIT_S)] if limit else []), "--", *command]
        code, output = self._on("node1", ["/opt/muster/venv/bin/python", *words])
        return Outcome(code, output, self._copied({"node1": f"/tmp/local/{name}"}, f"local-{name}"))

    def fab(self, name: str, command: list[str], limit: bool) -> Outcome:
        inventory = ["--inventory", str(self.slurm.cluster.inventory), "--nodes", "2", "--run-id", name]
        more = ["--time-limit", str(LIMIT_S)] if limit else []
        words = [
            f"{Path(sys.executable).parent}/fab",
            "launch",
            *inventory,
            "--results",
            str(self.folder / "fab"),
            *more,
        ]
        code, output = self._here([*words, "--", *command], ROOT)
        return Outcome(code, output, self.folder / "fab" / name)

    def ansible(self, name: str, command: list[str], limit: bool) -> Outcome:
        asked = {"run_id": name, "nodes": 2, "runtime": "venv", "job_results": str(self.folder / "ansible")}
        asked |= {"time_limit": LIMIT_S} if limit else {}
        asked |= (
            {"config": command[2], "overrides": shlex.join(command[3:])} if command[0] == "run" else {"script": command}
        )
        done = self.slurm.cluster.playbook("launch.yml", "-e", json.dumps(asked), check=False)
        return Outcome(done.returncode, done.stdout, self.folder / "ansible" / name)

    def sbatch(self, name: str, command: list[str], limit: bool) -> Outcome:
        is_ours = command[0] == "run"
        name = f"{name}-slurm"  # Ansible's runs are in the same folder: it must not go on with one of them
        job = self.slurm.submit(
            "ddp" if is_ours else "script", *(command[3:] if is_ours else command), MUSTER_RUN_ID=name
        )
        self.slurm.end(job)
        folders = dict.fromkeys(NODES[:2], f"/var/lib/muster/runs/{name}")
        code = int(self.slurm.facts(job)["ExitCode"].split(":")[0])
        return Outcome(code, f"{self.slurm.log(job)}(exit code {code})", self._copied(folders, name))

    def torchrun(self, name: str, command: list[str], limit: bool) -> Outcome:
        is_ours = command[0] == "run"
        words = ["/opt/muster/venv/bin/torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "node1"]
        started = []
        for rank, node in enumerate(NODES[:2]):
            more = ["--master-port", "29631", "--node-rank", str(rank)]
            ours = ["-m", "train", *command, "--run-id", name, "--runs-dir", "/tmp/torchrun"]
            argv = [*words, *more, *(ours if is_ours else ["--no-python", *command])]
            started.append(
                subprocess.Popen(self._exec(node, argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            deadline_s = time.monotonic() + 60
            for process in started:
                process.wait(deadline_s - time.monotonic())
            code = max(process.returncode for process in started)
        except subprocess.TimeoutExpired:
            code = STILL_THERE
            for node in NODES[:2]:
                self.slurm.cluster.on(node, "pkill", "--signal", "KILL", "--uid", "muster", check=False)
        output = "".join(process.communicate(timeout=30)[0] for process in started)
        return Outcome(code, output, self._copied({"node1": f"/tmp/torchrun/{name}"}, f"torchrun-{name}"))

    def docker_up(self, name: str, command: list[str], limit: bool) -> Outcome:
        self.compose.start(MUSTER_ARGS=shlex.join([*command[3:], "--run-id", name]))
        code = self.compose.wait(240)
        return Outcome(code, f"{self.compose.said()}(exit code {code})", self.compose.runs / name)

    def _exec(self, node: str, argv: list[str]) -> list[str]:
        variables = ["--env", "PYTHONPATH=/opt/muster", "--env", "PYTHONUNBUFFERED=1"]
        return [
            "docker",
            "exec",
            "--user",
            "muster",
            "-w",
            "/tmp",
            *variables,
            self.slurm.cluster.container(node),
            *argv,
        ]

    def _on(self, node: str, argv: list[str]) -> tuple[int, str]:
        return self._here(self._exec(node, argv), ROOT)

    def _here(self, argv: list[str], cwd: Path) -> tuple[int, str]:
        done = subprocess.run(
            argv, cwd=cwd, env=self.slurm.cluster.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=240, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def _copied(self, folders: dict[str, str], name: str) -> Path:
        """Run folders of hosts as one, the first host's on top."""
        target = self.folder / name
        target.mkdir()
        for node, folder in reversed(folders.items()):
            source = f"{self.slurm.cluster.container(node)}:{folder}/."
            subprocess.run(["docker", "cp", source, str(target)], capture_output=True, check=False)
        return target

    def row(self, what: str, **cells: str) -> None:
        self.table[what] = cells


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    need_lab()
    root = pwd.getpwuid(os.geteuid())
    with site() as slurm:
        compose = Compose(root, IMAGE)
        made = Ways(slurm, tmp_path_factory.mktemp("conformance"), compose)
        try:
            yield made
        finally:
            compose.remove()
            names = [*made.all]
            print("\n" + "".join(name.ljust(14) for name in ["", *names]))
            for what, cells in made.table.items():
                print("".join(cell.ljust(14) for cell in [what, *(cells.get(name, "") for name in names)]))


def files_of(run: Path) -> set[str]:
    """A run folder's files, whatever the hosts are called; but for what the launcher itself keeps beside the ranks'."""
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    names = {re.sub(r"logs/node\d+-[^/]+/", "logs/", name) for name in names}
    return {name for name in names if not name.startswith(".") and name != "logs/console"}


def test_the_weights_are_the_same_to_the_last_bit_and_so_are_the_files(ways: Ways) -> None:
    outcomes = {name: way("trains", TRAINS, False) for name, way in ways.all.items()}
    for name, outcome in outcomes.items():
        assert outcome.code == 0, f"{name}: {outcome.output}"
    digests = {name: weights_digest(outcome.run) for name, outcome in outcomes.items() if outcome.run}
    ways.row("weights", **{name: digest[:8] for name, digest in digests.items()})
    assert len(digests) == len(ways.all)
    assert len({*digests.values()}) == 1, digests
    files = {name: files_of(outcome.run) for name, outcome in outcomes.items() if outcome.run}
    ways.row("files", **{name: str(len(found)) for name, found in files.items()})
    of_agents = {name: found for name, found in files.items() if name != "torchrun"}
    assert all(found == of_agents["local agent"] for found in of_agents.values()), of_agents
    ranks_own = {f"times/rank{rank}.jsonl" for rank in range(4)}  # an agent writes down for all in one file
    assert ranks_own <= files["torchrun"]
    assert files["torchrun"] - ranks_own < of_agents["local agent"]
    ways.row("success", **{name: str(outcome.code) for name, outcome in outcomes.items()})


def test_the_ranks_have_the_same_environment(ways: Ways) -> None:
    found: dict[str, dict[int, dict[str, str]]] = {}
    for name, way in ways.all.items():
        if name == "compose":  # it starts recipes alone
            continue
        outcome = way("shows", SHOWS, False)
        assert outcome.code == 0, f"{name}: {outcome.output}"
        text = outcome.output
        if outcome.run is not None:
            text += "\n".join(path.read_text() for path in outcome.run.rglob("rank*.log"))
        rows = [dict(word.split("=", 1) for word in line.split()) for line in re.findall(r"(RANK=.*) \.$", text, re.M)]
        found[name] = {int(row["RANK"]): row for row in rows}
        assert sorted(found[name]) == [0, 1, 2, 3], text
        ways.row("environment", **{**ways.table.get("environment", {}), name: f"{len(found[name])} ranks"})
    theirs = found.pop("torchrun")
    alone = found.pop("local agent")
    for name, ours in found.items():
        assert ours == theirs, name
    assert {row["RANK"]: row["WORLD_SIZE"] for row in alone.values()} == {str(rank): "4" for rank in range(4)}


@pytest.mark.parametrize("case", CASES)
def test_it_ends_with_the_same_verdict(ways: Ways, case: str) -> None:
    command, expected = CASES[case]
    cells = {}
    for name, way in ways.all.items():
        is_limit = case == "time limit"
        if name == "compose" and case != "bad config":  # tests/container kills and stops it from outside
            continue
        if name == "torchrun" and expected == 75:  # it knows no such thing
            continue
        if name == "slurm" and is_limit:  # the job goes back into the queue: tests/lab/test_slurm.py
            continue
        outcome = way(case.replace(" ", "-"), command, is_limit)
        if name == "torchrun":
            assert outcome.code != 0, outcome.output
            cells[name] = "still there" if outcome.code == STILL_THERE else str(outcome.code)
            continue
        assert outcome.verdict == expected, f"{name}: {outcome.output}"
        if name == "ansible":
            assert outcome.code != 0
        else:
            assert outcome.code == expected, f"{name}: {outcome.code}\n{outcome.output}"
        cells[name] = str(outcome.verdict)
    ways.row(case, **cells)


ODD = [
    "it's", 'a "b"', "$(touch /tmp/odd)", "${HOME}", "$$", "%i", "; touch /tmp/odd", "`touch /tmp/odd`", "", "-x",
    "ä  ö", "a\nb",
]  # fmt: skip


def test_words_of_a_command_are_words_with_every_launcher(ways: Ways) -> None:
    cells = {}
    for name, way in ways.all.items():
        if name in ("compose", "torchrun"):  # the one starts recipes alone, the other is not ours
            continue
        outcome = way("odd", ["sh", "-c", 'printf "<%s>" "$@"; echo .', "sh", *ODD], False)
        assert outcome.code == 0, f"{name}: {outcome.output}"
        assert outcome.run is not None
        logs = [path.read_text() for path in outcome.run.rglob("rank*.log")]
        assert len(logs) == 4
        expected = "".join(f"<{word}>" for word in ODD) + "."
        for log in logs:
            said = "\n".join(re.sub(r"^[\d-]+ [\d:.]+ ", "", line) for line in log.splitlines())
            assert said == expected, name
        cells[name] = "as given"
    ways.row("odd words", **cells)
    for host in ["head", *NODES]:
        assert ways.slurm.cluster.on(host, "sh", "-c", "ls /tmp/odd 2>/dev/null; true") == ""
    assert not Path("/tmp/odd").exists()
