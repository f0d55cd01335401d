"""A job that is watched from another machine stops when whoever watched is gone, or asks it to."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.hosts import Lab, until
from tests.lab.faults import needs_hosts
from tests.lab.test_misuse import alone
from tests.lab.test_stopping import SAVES, STUBBORN

pytestmark = [pytest.mark.slow]


def test_it_stops_when_the_lease_is_not_renewed_and_not_before(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    lease.touch()
    agent = alone("--lease-file", str(lease), "--lease-s", "2", "--", *SAVES, cwd=tmp_path)
    assert agent.stdout is not None
    while agent.stdout.readline() != "up\n":
        pass
    until = time.monotonic() + 5
    while time.monotonic() < until:
        lease.touch()
        time.sleep(0.2)
    assert agent.poll() is None
    left = time.monotonic()
    output = agent.stdout.read()
    assert agent.wait(30) == 75, output
    assert time.monotonic() - left > 1.5
    assert output.splitlines()[-1] == (
        "muster: stopped by the end of its lease (whoever watched is gone for 2 s), saved: "
        "the same command goes on from there"
    )


@needs_hosts
def test_words_in_a_lease_of_any_host_stop_all_and_a_kill_ends_all_at_once(two: Lab) -> None:
    lease = two.hosts[1].folder / "lease"
    lease.touch()
    job = two.launch(STUBBORN, options=["--lease-file", str(lease), "--lease-s", "600"])
    job.wait_for_output("| up", 2)
    lease.write_text("stop Ctrl-C of ann\n")
    job.wait_for_output("stopping, asked by Ctrl-C of ann;", 2)
    lease.write_text("kill a second Ctrl-C of ann\n")
    assert job.codes() == [8, 8], job.report()
    verdict = json.loads((job.run_folder() / "verdict.json").read_text())
    assert verdict["cause"] == "stopped at once by a second Ctrl-C of ann"
    until(lambda: job.left_behind() == {}, 5)  # keepers end after their agents


def test_a_kill_needs_no_stop_before_it(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    agent = alone("--lease-file", str(lease), "--", *STUBBORN, cwd=tmp_path)
    assert agent.stdout is not None
    while agent.stdout.readline() != "up\n":
        pass
    lease.write_text("kill ann")
    output = agent.stdout.read()
    assert agent.wait(10) == 8, output
    assert output.splitlines()[-1] == "muster: stopped at once by ann"
