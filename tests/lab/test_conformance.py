"""All launchers are one: the same plan, ranks, bits, files and verdicts, whoever starts the job. Prints the table."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.cluster import Cluster as Compose
from tests.container.conftest import IMAGE
from tests.lab.cluster import ANSIBLE, need_lab
from tests.lab.slurms import NODES, site
from tests.lab.ways import STILL_THERE, Ways
from tests.odd import ODD
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


SHOWN = 'import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if "ODD" in k}]))'
CANARIES = "ls /tmp/odd /tmp/canary /canary /home/*/canary /var/lib/muster/canary /tmp/*/canary 2>/dev/null; true"


def untouched(ways: Ways) -> bool:
    """Whether no word was executed, neither here nor on a host."""
    found = [ways.slurm.cluster.on(host, "sh", "-c", CANARIES) for host in ["head", *NODES]]
    here = [Path(folder, "canary") for folder in ("/tmp", ROOT, ANSIBLE, Path.home())]
    return not any(found) and not any(path.exists() for path in (Path("/tmp/odd"), *here))


@pytest.mark.parametrize("runtime", ["venv", "docker"])
def test_words_and_values_of_variables_reach_the_ranks_as_given(ways: Ways, runtime: str) -> None:
    values = {f"ODD{number}": value for number, value in enumerate(ODD)}
    cells = {}
    for name in ("local agent", "fab", "ansible", "slurm") if runtime == "venv" else ("fab", "ansible"):
        ways.variables, ways.runtime = values, runtime
        try:
            outcome = ways.all[name](f"odd-{runtime}", ["python3", "-c", SHOWN, *ODD], False)
        finally:
            ways.variables, ways.runtime = {}, "venv"
        assert outcome.code == 0, f"{name}: {outcome.output}"
        assert outcome.run is not None
        logs = [path.read_text() for path in outcome.run.rglob("rank*.log")]
        assert len(logs) == 4
        for log in logs:
            (line,) = re.findall(r"^[\d-]+ [\d:.]+ (\[\[.*)$", log, re.MULTILINE)
            assert json.loads(line) == [ODD, values], name
        cells[name] = "as given"
    ways.row(f"odd, {runtime}", **cells)
    assert untouched(ways)


def test_values_of_a_config_are_values(ways: Ways) -> None:
    value = '$(touch /tmp/odd); `touch /tmp/odd` it\'s "q" ä.txt'
    cells = {}
    for name, way in ways.all.items():
        outcome = way("odd-value", ["run", "--config", "ddp", "--data.paths", json.dumps([value])], False)
        assert outcome.code != 0 if name in ("ansible", "torchrun") else outcome.code == 2, outcome.output
        text = outcome.output + "".join(path.read_text() for path in (outcome.run or ROOT / "none").rglob("rank*.log"))
        assert f"no such file or folder, and no glob that matches: {value}" in text, f"{name}: {text}"
        cells[name] = "as given"
    ways.row("odd config value", **cells)
    assert untouched(ways)


@pytest.mark.parametrize("run", ["$(touch /tmp/odd)", "a; touch /tmp/odd", "../x", "a\n`touch /tmp/odd`", "it's"])
def test_names_of_runs_that_are_none_are_refused_by_all(ways: Ways, run: str) -> None:
    for name, way in ways.all.items():
        command = TRAINS if name in ("compose", "torchrun") else ["sh", "-c", "touch /tmp/odd"]
        outcome = way(run, command, False)
        assert outcome.code != 0 if name in ("ansible", "torchrun") else outcome.code == 2, f"{name}: {outcome.output}"
        words = "must be letters, digits|must be the name of a folder, not a path"
        assert re.search(words, " ".join(outcome.output.split())), f"{name}: {outcome.output}"
    assert untouched(ways)
