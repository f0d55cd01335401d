"""Watchers of one launch, each of its own host: what they say to their agents, and when they are done."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.launch.watch import AFTER_THE_OTHERS_S, ALONE_S, KILL_S, OVERDUE_S, UNREACHABLE_S, Notes, Watch

HOSTS = ["a", "b", "c"]
GRACE_S = 30.0


class Clock:
    """Told the time."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def notes(tmp_path: Path, clock: Clock) -> Notes:
    return Notes(tmp_path / "notes", clock)


def watches(notes: Notes, hosts: list[str] = HOSTS) -> list[Watch]:
    return [Watch(host, hosts, notes, GRACE_S) for host in hosts]


def test_as_long_as_all_is_well_leases_are_renewed(notes: Notes, clock: Clock) -> None:
    for _ in range(100):
        clock.now_s += 10
        for watch in watches(notes):
            assert watch.order() == ""
            assert watch.heard(alive=True) is None


def test_a_note_is_written_once_whoever_comes_first(notes: Notes, clock: Clock, tmp_path: Path) -> None:
    notes.write("stop", "Ctrl-C")
    clock.now_s += 1
    notes.write("stop", "somebody else")
    assert notes.read("stop") == ("Ctrl-C", 1000.0)
    assert notes.read("none") is None
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["stop"]
    assert (tmp_path / "notes").stat().st_mode & 0o777 == 0o700


def test_a_stop_and_then_a_kill_go_to_all(notes: Notes, clock: Clock) -> None:
    a, b, _ = watches(notes)
    notes.write("stop", "Ctrl-C")
    assert (a.order(), b.order()) == ("stop Ctrl-C", "stop Ctrl-C")
    assert a.heard(alive=True) is None
    notes.write("kill", "a second Ctrl-C")
    assert (a.order(), b.order()) == ("kill a second Ctrl-C", "kill a second Ctrl-C")
    clock.now_s += KILL_S
    assert a.heard(alive=True) is None
    clock.now_s += 0.1
    assert a.heard(alive=True) == "overdue"
    assert b.heard(alive=False) == "ended"


def test_who_saves_too_long_is_overdue(notes: Notes, clock: Clock) -> None:
    a, *_ = watches(notes)
    notes.write("stop", "Ctrl-C")
    clock.now_s += GRACE_S + OVERDUE_S
    assert a.heard(alive=True) is None
    clock.now_s += 0.1
    assert a.heard(alive=True) == "overdue"


def test_the_end_of_one_agent_must_be_noticed_by_the_others_or_they_are_stopped(notes: Notes, clock: Clock) -> None:
    a, b, c = watches(notes)
    assert c.heard(alive=False) == "ended"
    clock.now_s += ALONE_S
    assert a.order() == ""
    clock.now_s += 0.1
    assert a.order() == b.order() == "stop the launcher, for the agent of c has ended"


def test_a_host_that_does_not_answer_is_given_up_and_the_job_with_it(notes: Notes, clock: Clock) -> None:
    a, b, _ = watches(notes)
    clock.now_s += UNREACHABLE_S
    assert b.unheard("no route") is None
    assert a.heard(alive=True) is None
    clock.now_s += 0.1
    assert b.unheard("no route") == "lost"
    assert a.order() == "stop the launcher, which cannot reach b"
    note = notes.read("b.lost")
    assert note is not None
    assert note.text == "no route"


def test_a_host_that_answers_again_in_time_is_not_lost(notes: Notes, clock: Clock) -> None:
    a, *_ = watches(notes)
    for _ in range(5):
        clock.now_s += UNREACHABLE_S
        assert a.unheard("no route") is None
        assert a.heard(alive=True) is None


def test_once_the_others_have_ended_a_silent_host_is_not_waited_for(notes: Notes, clock: Clock) -> None:
    a, b, c = watches(notes)
    clock.now_s += AFTER_THE_OTHERS_S + 1
    assert a.heard(alive=False) == "ended"
    assert b.unheard("no route") is None
    assert c.heard(alive=False) == "ended"
    assert b.unheard("no route") == "lost"


def test_a_single_host_is_waited_for(notes: Notes, clock: Clock) -> None:
    (a,) = watches(notes, ["a"])
    clock.now_s += UNREACHABLE_S
    assert a.unheard("no route") is None
    clock.now_s += 0.1
    assert a.unheard("no route") == "lost"


def test_whoever_only_looks_on_gives_no_orders_and_ends_nobodys_job(notes: Notes, clock: Clock) -> None:
    """It loses a host, for long; the others' watchers neither stop the job nor call it overdue."""
    first, second, _ = (Watch(host, HOSTS, notes, GRACE_S, only_looks=True) for host in HOSTS)
    clock.now_s += UNREACHABLE_S + 1
    assert first.unheard("the cable") == "lost"
    for _ in range(100):
        clock.now_s += 10
        assert second.order() == ""
        assert second.heard(alive=True) is None
    assert notes.read("stop") is None
    assert second.heard(alive=False) == "ended"
