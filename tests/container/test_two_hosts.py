"""`docker compose up` by somebody who is not root: four ranks in two containers, to the end and around every fault."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.container.cluster import SMALL, Cluster, compose_command, until
from tests.ranks import free_port, train_ranks, weights_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for the image

DOWN_S = 10  # within which no host may be up any more
TRAINING = ["--train.steps", "8", "--train.sample_tokens", "8", "--train.log_every", "1"]


@dataclass
class Finished:
    """A run that came to its end, and what was seen of it."""

    run: Path
    said: str
    owners: set[int]
    processes: set[tuple[int, str]]
    still_up: list[str]
    caller: int


@pytest.fixture(scope="module")
def finished(cluster: Cluster) -> Finished:
    """The default recipe by Compose alone, as in README, with few steps; who its processes are while it trains."""
    cluster.start([*compose_command(), "up"], MUSTER_ARGS=" ".join(TRAINING))
    cluster.wait_for_step(1)
    seen = {row[1:] for host in ("node0", "node1") for row in cluster.processes(host)}
    assert cluster.wait() == 0, cluster.said()
    owners = {path.stat().st_uid for path in cluster.runs.rglob("*")}
    found = Finished(cluster.run(), cluster.said(), owners, seen, cluster.running(), cluster.caller.pw_uid)
    cluster.clear()
    return found


@pytest.fixture(autouse=True)
def _nothing_left_for_the_next(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


def test_two_hosts_train_to_the_end(finished: Finished) -> None:
    run = finished.run
    verdict = json.loads((run / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"], verdict["step"]) == ("finished", 0, 8)
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["world_size"], environment["backend"], environment["threads"]) == (4, "gloo", 1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    logs = {f"logs/node{rank // 2}-node{rank // 2}/rank{rank}.log" for rank in range(4)}
    documents = {"plan.json", "config.yaml", "events.jsonl", "summary.json", "sample.txt"}
    assert {"checkpoints/latest", *logs, *documents} <= names
    assert finished.still_up == []
    said = re.sub(r"\x1b\[\d*[mK]", "", finished.said)
    assert re.findall(r"^node0\S* *\| (.*)", said, re.MULTILINE)[-1] == "muster: finished: step 8"


def test_what_they_wrote_belongs_to_the_caller(finished: Finished) -> None:
    assert finished.owners == {finished.caller}


def test_no_process_is_root_once_training_starts(finished: Finished) -> None:
    # Docker starts a health check as it started the container: its first moment, before it becomes the owner, may show.
    others = {uid for uid, args in finished.processes if not re.search("healthcheck|runc|setpriv", args)}
    assert others == {finished.caller}
    assert any("-m train run" in args for _, args in finished.processes)


def test_the_same_ranks_without_containers_end_with_the_same_weights(finished: Finished, tmp_path: Path) -> None:
    in_image = json.loads((finished.run / "environment.json").read_text())["torch"]
    if in_image != torch.__version__ and "CI" not in os.environ:
        pytest.skip(f"this Python has torch {torch.__version__}, the image {in_image}: bits may differ")
    arguments = ["run", "--config", "ddp", *TRAINING, "--runs-dir", str(tmp_path), "--run-id", "bare"]
    for done in train_ranks(4, *arguments):
        assert done.returncode == 0, done.stdout
    assert weights_digest(finished.run) == weights_digest(tmp_path / "bare")


def test_stop_saves_and_up_goes_on(cluster: Cluster) -> None:
    cluster.start(MUSTER_ARGS=f"{SMALL} --train.steps 100000")
    cluster.wait_for_step(20)
    until(lambda: "(healthy)" in cluster.compose("ps"), 30, cluster.said)
    started = time.monotonic()
    cluster.compose("stop")
    took_s = time.monotonic() - started
    assert cluster.wait(30) == 75, cluster.said()
    assert cluster.left() == []
    assert took_s < DOWN_S
    run = cluster.run()
    saved = json.loads((run / "verdict.json").read_text())["step"]
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{saved:08d}"
    assert weights_digest(run)  # torch can read it

    cluster.start(MUSTER_ARGS=f"{SMALL} --train.steps 100000")
    cluster.wait_for_step(saved + 20)
    cluster.signal(signal.SIGTERM)  # to docker/up
    assert cluster.wait(60) == 75, cluster.said()
    assert cluster.left() == []
    assert cluster.run() == run
    saved_again = json.loads((run / "verdict.json").read_text())["step"]
    assert [row["step"] for row in cluster.rows() if "loss" in row] == list(range(1, saved_again + 1))


def kill_a_host(service: str, cluster: Cluster) -> None:
    pid = next(pid for pid, _, args in cluster.processes(service) if args.startswith("tini"))
    os.kill(pid, signal.SIGKILL)


def kill_a_rank(service: str, cluster: Cluster) -> None:
    pid = next(pid for pid, _, args in cluster.processes(service) if "-m train run" in args and "node" not in args)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="kills processes inside containers from outside, which needs root")
@pytest.mark.parametrize(
    ("fault", "service", "recipe", "code", "words"),
    [
        (kill_a_host, "node0", "ddp", 7, "host node0 (node rank 0) was lost"),
        (kill_a_host, "node1", "manual", 7, "host node1 (node rank 1, ranks 2-3) was lost"),
        (kill_a_rank, "node1", "amp", 5, "(node1) was killed by signal 9"),
    ],
    ids=["host 0", "host 1", "a rank"],
)
def test_where_something_is_killed_both_go_down_with_the_right_code(
    cluster: Cluster, fault: Callable[[str, Cluster], None], service: str, recipe: str, code: int, words: str
) -> None:
    cluster.start(MUSTER_CONFIG=recipe, MUSTER_ARGS=f"{SMALL} --train.steps 100000 --train.seed {code}{service[-1]}")
    cluster.wait_for_step(5)
    fault(service, cluster)
    took_s = cluster.wait_until_down()
    assert cluster.wait(30) == code, cluster.said()
    assert took_s < DOWN_S
    assert cluster.left() == []
    verdict = json.loads((cluster.run() / "verdict.json").read_text())
    assert verdict["exit_code"] == code
    assert words in verdict["cause"]
    config = (cluster.run() / "config.yaml").read_text()
    assert ("name: bf16" in config, "name: manual" in config) == (recipe == "amp", recipe == "manual")


def test_a_bad_config_is_refused_by_both(cluster: Cluster) -> None:
    before = set(cluster.runs.glob("*/environment.json"))
    cluster.start(MUSTER_ARGS="--optim.lrr 1")
    assert cluster.wait(60) == 2, cluster.said()
    assert "ranks 0-3 refused to start: optim.lrr: no such field; did you mean optim.lr?" in cluster.said()
    assert cluster.left() == []
    assert set(cluster.runs.glob("*/environment.json")) == before


def test_where_no_host_comes_to_be_it_says_so_with_code_3(cluster: Cluster) -> None:
    cluster.start(("docker/up", "-f", "compose.yaml", "-f", "compose.gpu.yaml"))
    assert cluster.wait(60) == 3, cluster.said()
    assert "driver" in cluster.said()  # no NVIDIA runtime here
    assert cluster.left() == []


def test_the_board_profile_shows_the_runs(cluster: Cluster) -> None:
    port = str(free_port())
    cluster.start([*compose_command(), "--profile", "board", "up", "-d", "board"], MUSTER_BOARD_PORT=port)
    assert cluster.wait() == 0, cluster.said()

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugins_listing", timeout=5) as page:
                return b"scalars" in page.read()
        except OSError:
            return False

    until(answers, 60, cluster.said)
    assert {uid for _, uid, _ in cluster.processes("board")} == {cluster.caller.pw_uid}
    cluster.compose("--profile", "board", "down", "--volumes")
    assert cluster.left() == []
