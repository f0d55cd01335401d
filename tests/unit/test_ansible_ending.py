"""What a launcher says last, whether hosts are fit, and who runs what: of what hosts told, the one thing that holds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from train.launch import ending, fitness, overview
from train.seam import Exit

FINE = {"exit_code": 0, "said": ["node rank 0 | loss 1", "muster: run folder /r/x", "muster: finished: step 8"]}
LOST = {"exit_code": 7, "said": ["x", "muster: host b (node rank 1) was lost: no word from it"]}
KILLED = {"exit_code": 137, "said": ["muster: 4 ranks"], "last_words": "muster: 4 ranks"}
GONE: dict[str, Any] = {"lost": True}


@pytest.mark.parametrize(
    ("hosts", "code", "words", "whose"),
    [
        ({"a": FINE, "b": FINE}, 0, "finished: step 8", "a"),
        ({"a": LOST, "b": GONE}, 7, "host b (node rank 1) was lost: no word from it", "a"),
        ({"a": GONE, "b": LOST}, 7, "host b (node rank 1) was lost: no word from it", "b"),
        ({"a": KILLED, "b": LOST}, 7, "host b (node rank 1) was lost: no word from it", "b"),
        ({"a": GONE, "b": GONE}, 7, "a, b cannot be reached", "a"),
        ({"a": KILLED, "b": GONE}, 7, "b cannot be reached and a was killed before it could say why: muster: 4 ranks",
         "a"),
        ({"a": {"failed": True, "msg": "no image"}, "b": KILLED}, 3, "nothing was trained: a: no image", "a"),
        ({"a": {}, "b": {"failed": True, "msg": "it is in use by launch 1 of ann"}}, 3,
         "nothing was trained: b: it is in use by launch 1 of ann: wait, stop it by stop.yml, or run beside it with "
         "-e share=true", "b"),
        ({"a": {"exit_code": 2, "said": ["a rank 0 | 2 problems, nothing was started:", "a rank 0 |   optim.lr: bad",
                                         "a rank 0 |   seed: worse", "muster: rank 0 (a) refused"]}}, 2,
         "nothing was started: optim.lr: bad; seed: worse", "a"),
        ({"a": {"exit_code": 2, "said": ["nothing was started:", "  no such port", "  nor host"]}}, 2,
         "nothing was started: no such port; nor host", "a"),
        ({"a": {"exit_code": 3, "said": [], "last_words": "entrypoint: /dev/shm has 64 MB"}}, 3,
         "a: entrypoint: /dev/shm has 64 MB", "a"),
    ],
)  # fmt: skip
def test_the_verdict_is_agent_0_s_or_that_of_the_lowest_survivor(
    hosts: dict[str, Any], code: int, words: str, whose: str
) -> None:
    found = ending.verdict([*hosts], hosts)
    assert (found["exit_code"], found["words"], found["host"]) == (code, words, whose)


def test_the_last_line_has_the_exit_code_in_words_and_before_it_what_was_not_seen_yet() -> None:
    found = ending.verdict(["a", "b"], {"a": GONE, "b": LOST})
    told = ending.last_words(found, ["a", "b"], {"a": {"msg": "no route"}, "b": {"dest": "/runs/x"}}).splitlines()
    assert told == [
        "the last lines of b:", "  | x", "  | muster: host b (node rank 1) was lost: no word from it",
        "muster: a: not all could be brought: no route", "muster: results are in /runs/x",
        "muster: host b (node rank 1) was lost: no word from it (exit code 7: a host was lost)",
    ]  # fmt: skip
    found = ending.verdict(["a"], {"a": FINE})
    assert ending.last_words(found, ["a"], {"a": {}}) == "muster: finished: step 8 (exit code 0: finished)"


def test_every_exit_code_has_words() -> None:
    assert set(ending.WORDS) == set(Exit)


PROBE = {"problems": [], "image": "sha256:" + "0" * 64, "gpus": 0, "gpu_files": 0, "launches": [], "ahead_s": 0.1,
         "ahead_within_s": 0.01, "free_mb": 5000}  # fmt: skip
RUNNING = {"id": "1", "by": "ann", "since": 0, "run_id": "r", "running": True, "slots": 2, "world_size": 4,
           "last_line": "step 7", "step": 7, "phase": "step", "age_s": 1.0, "names": ["a", "b"]}  # fmt: skip
REQUEST = {"hosts": {name: {"slots": 2, "address": f"10.0.0.{i}"} for i, name in enumerate("abc")}, "share": False}


def test_a_fit_host_and_every_reason_against_others() -> None:
    assert fitness.unfit({"a": PROBE, "b": PROBE}, REQUEST, "cpu") == []
    since = time.strftime("%F %T", time.localtime(0))
    probes: dict[str, dict[str, Any]] = {
        "a": {**PROBE, "launches": [RUNNING], "problems": ["no folder"]},
        "b": {"unreachable_why": "No route to host"},
        "c": {**PROBE, "image": "sha256:" + "f" * 64},
    }
    assert fitness.unfit(probes, REQUEST, "cpu") == [
        "a: no folder",
        f"a: it is in use by launch 1 of ann since {since} (run r): wait, or stop.yml, or -e share=true",
        "b cannot be reached: No route to host",
        "the image is not the same everywhere (c has sha256:ffffffffffff, a has sha256:000000000000): "
        "run provision.yml",
    ]
    assert fitness.unfit({"a": {**PROBE, "launches": [RUNNING]}}, {**REQUEST, "share": True}, "cpu") == []


def test_gpus_that_are_asked_for_must_be_there() -> None:
    assert fitness.unfit({"a": {**PROBE, "gpus": 2, "gpu_files": 2}}, REQUEST, "cuda") == []
    (words,) = fitness.unfit({"a": {**PROBE, "gpu_files": 2}}, REQUEST, "cuda")
    assert words.startswith(
        "a: 2 GPUs are asked for (slots), but nvidia-smi lists 0, of device files there are 2: check"
    )


def test_the_table_of_what_runs() -> None:
    ended = {**RUNNING, "id": "0", "running": False, "exit_code": 75, "world_size": None, "run_id": None}
    hosts: dict[str, dict[str, Any]] = {
        "a": {"launches": [{**RUNNING, "age_s": 99.0}, ended]}, "longer": {"launches": []},
        "c": {"unreachable_why": "No route"}, "d": {"problems": ["no sudo"]},
    }  # fmt: skip
    since = time.strftime("%F %H:%M", time.localtime(0))
    assert overview.status(hosts) == [
        "host    launch  run  by   since             ranks   step  state                  last line",
        f"a       1       r    ann  {since}  2 of 4  7     step, silent for 99 s  step 7",
        "longer  nothing runs",
        "c       cannot be reached: No route",
        "d       no sudo",
    ]
    told = overview.status(hosts, all_of_them=True)
    assert told[2].split() == [*f"a 0 not known yet ann {since} 2 7 ended with 75 step 7".split()]
    assert told[3] == "longer  nothing is known"
    assert overview.silent(hosts) == ["c: cannot be reached: No route", "d: no sudo"]
    assert overview.status({"a": {"launches": []}})[1] == "a     nothing runs"


def test_the_launch_that_is_meant_is_the_newest_or_the_one_named() -> None:
    old = {**RUNNING, "id": "0", "running": False, "run_id": "old"}
    hosts: dict[str, dict[str, Any]] = {"b": {"launches": [RUNNING]}, "a": {"launches": [RUNNING, old]}, "c": {}}
    newest, named = overview.pick(hosts), overview.pick(hosts, run_id="old")
    assert newest is not None
    assert named is not None
    assert (newest["id"], newest["names"], sorted(newest["hosts"])) == ("1", ["a", "b"], ["a", "b"])
    assert (named["id"], named["names"]) == ("0", ["a"])
    assert (overview.pick(hosts, "0") or {}).get("id") == "0"
    assert overview.pick(hosts, "0", running=True) is None
    assert overview.pick(hosts, "7") is None


def test_what_became_of_those_that_were_asked_to_stop() -> None:
    saved = {"exit_code": 75, "said": ["muster: stopped by ann, saved"]}
    told = overview.stopped({"a": {"launches": [RUNNING]}, "b": {"launches": [RUNNING]}}, {"a": [saved], "b": [saved]})
    line = "muster: launch 1: stopped by ann, saved (exit code 75: stopped and saved, run it again to go on)"
    assert told == {"lines": [line], "is_good": True}
    told = overview.stopped({"a": {"launches": [RUNNING]}, "b": {"unreachable_why": "no route"}}, {"a": [saved]})
    assert told == {"lines": ["muster: b: cannot be reached: no route", line], "is_good": False}
    told = overview.stopped({"a": {"launches": [RUNNING]}}, {"a": [LOST]})
    assert not told["is_good"]
    assert overview.stopped({"a": {"launches": []}}, {}) == {
        "lines": ["muster: nothing runs that is meant"], "is_good": True,
    }  # fmt: skip
