"""Ranks under a node agent, seen from its side of the seam: pages, files beside them, output."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.agents import FakeAgent
from tests.odd import ODD_LINE, odd_job
from train.seam import LOG_ONLY, Phase

SMALL = (
    "run", "--strategy.name=ddp", "--model.name=mlp", "--data.name=classification", "--batch.global_size=16",
    "--train.tensorboard=false", "--train.log_every=1",
)  # fmt: skip


def lines_of(output: str) -> list[str]:
    """Its lines; not by splitlines, which takes LOG_ONLY itself for an end of line."""
    return output.removesuffix("\n").split("\n")


def test_a_stop_asked_for_before_the_start_ends_all_ranks_saved_after_few_steps(tmp_path: Path) -> None:
    """The page keeps the request while torch is loaded. It is asked of rank 1 alone: all stop at one step."""
    with FakeAgent(tmp_path) as agent:
        agent.pages[1].ask_to_stop()
        agent.start(*SMALL, "--train.steps=100000")
        codes, outputs = agent.end()
        assert codes == [75, 75], outputs
        told = [page.read() for page in agent.pages]
        assert [status.is_ours for status in told] == [True, True]
        assert {status.phase for status in told} == {Phase.ENDING}
        (step,) = {status.step for status in told}
        assert 1 <= step <= 2  # asked in step 1, read a step later
        assert [status.saved_step for status in told] == [step, step]
        assert (agent.run / "checkpoints" / "latest").read_text().strip() == f"step-{step:08}"
        assert not any(agent.beside(rank, "failure.json").exists() for rank in (0, 1))
        assert [agent.beside(rank, "run").read_text() for rank in (0, 1)] == [str(agent.run)] * 2

        # The agent keeps the logs and writes the verdict.
        assert not (agent.run / "verdict.json").exists()
        assert not (agent.run / "logs").exists()
        assert json.loads((agent.run / "environment.json").read_text())["started_by"] == "agent"
        assert not any(line.startswith(LOG_ONLY) for line in lines_of(outputs[0]))
        hidden = [line for line in lines_of(outputs[1]) if line.startswith(LOG_ONLY)]
        assert f"{LOG_ONLY}run folder {agent.run}" in hidden
        assert f"run folder {agent.run}" in lines_of(outputs[0])
        assert [line for line in lines_of(outputs[1]) if not line.startswith(LOG_ONLY)] == []
        assert "\x1b" not in outputs[0] + outputs[1]


def _own(folder: Path, act: str) -> list[str]:
    """The command for a job in which rank 1 does something odd in its third forward."""
    return odd_job(folder, act, "--train.epochs=1", call=3)


def test_an_exception_on_one_rank_tells_culprit_from_victim(tmp_path: Path) -> None:
    with FakeAgent(tmp_path) as agent:
        agent.start(*_own(tmp_path, 'raise ValueError("two\\nlines")'))
        codes, outputs = agent.end()
        assert codes == [5, 5], outputs
        victim, culprit = agent.told(0, "failure.json"), agent.told(1, "failure.json")
        assert culprit == {
            "kind": "exception", "exit_code": 5, "step": 2,
            "words": f"ValueError: two at {tmp_path}/own_odd.py:{ODD_LINE}",
        }  # fmt: skip
        assert (victim["kind"], victim["exit_code"], victim["step"]) == ("collective", 5, 2)
        assert "lost contact with another rank in step 3" in victim["words"]
        assert "Traceback" in outputs[1]


@pytest.mark.slow
def test_the_survivor_of_a_kill_is_a_victim(tmp_path: Path) -> None:
    with FakeAgent(tmp_path) as agent:
        agent.start(*_own(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
        codes, outputs = agent.end()
        assert codes == [5, -signal.SIGKILL], outputs
        assert agent.told(0, "failure.json")["kind"] == "collective"
        assert not agent.beside(1, "failure.json").exists()


def test_a_refused_config_and_a_rank_that_waits_in_vain_have_kinds_of_their_own(tmp_path: Path) -> None:
    with FakeAgent(tmp_path) as agent:
        agent.start(*SMALL, "--runtime.join_timeout_s=2", ranks=[0])
        agent.start(*SMALL, "--train.steps=0", "--batch.global_size=1", ranks=[1])
        codes, outputs = agent.end()
        assert codes == [4, 2], outputs
        waiter, refused = agent.told(0, "failure.json"), agent.told(1, "failure.json")
        assert (waiter["kind"], waiter["exit_code"], waiter["step"]) == ("join", 4, 0)
        assert waiter["words"].startswith("rank 1 of 2 did not join within 2 s")
        assert (refused["kind"], refused["exit_code"]) == ("usage", 2)
        assert [line.split(":")[0] for line in refused["words"].splitlines()] == [
            "train.steps",
            "batch.global_size",
        ]
        assert not agent.pages[1].read().is_ours  # refused before it told anything
        assert agent.pages[0].read().is_ours
        assert agent.pages[0].read().budget_s == 1800


def test_the_flight_records_of_a_hang_tell_who_is_behind_and_where(tmp_path: Path) -> None:
    """Rank 1 never enters the third step's first all-reduce; both tell so while their main threads are stuck."""
    with FakeAgent(tmp_path) as agent:
        # Torch's own time-out comes later than this one: the agent is to judge.
        agent.start(*_own(tmp_path, "time.sleep(1000)"), "--runtime.step_timeout_s=1")
        agent.wait_until(lambda: all(page.read().step == 2 for page in agent.pages))
        agent.wait_until(lambda: time.monotonic() - agent.pages[0].read().progress_s > 3)
        for page in agent.pages:
            page.ask_for_evidence()
        agent.wait_until(lambda: all(agent.beside(rank, "flight.json").exists() for rank in (0, 1)))
        waiting, stuck = agent.told(0, "flight.json"), agent.told(1, "flight.json")
    assert [(told["step"], told["phase"]) for told in (waiting, stuck)] == [(2, "step"), (2, "step")]
    assert stuck["at"] == f"{tmp_path}/own_odd.py:{ODD_LINE} forward"
    assert "/train/" in waiting["at"]
    ours, theirs = ({group["description"]: group for group in told["groups"]} for told in (waiting, stuck))
    assert set(ours) == set(theirs) == {"step", "saving"}  # nothing has been evaluated yet
    assert ours["saving"]["last"] == theirs["saving"]["last"]
    # The sums of the step are the first that rank 1 is missing in; rank 0 also waits for the gradients behind them.
    last = theirs["step"]["last"]
    assert theirs["step"]["entries"][-1]["seq"] == last
    assert all(entry["retired"] for entry in theirs["step"]["entries"])
    missed = [entry for entry in ours["step"]["entries"] if entry["seq"] > last]
    assert (missed[0]["seq"], missed[0]["op"], missed[0]["sizes"]) == (last + 1, "gloo:all_reduce", [[3]])
    assert missed[-1]["seq"] == ours["step"]["last"]
    assert not any(entry["retired"] for entry in missed)
    assert 2 <= missed[0]["age_s"] < 60
