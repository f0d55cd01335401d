"""What `fab` does, but for SSH itself: who the hosts are, what they are told, and a whole launch on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.here import Here, launched, with_hosts
from train.errors import UsageError
from train.launch import ending, fitness, request, ssh, ssh_host, ssh_later, ssh_preflight
from train.launch.remedies import ANSIBLE
from train.launch.ssh_host import Login, SshHost, UnreachableError
from train.launch.ssh_site import FAB, Site, own_words, site_of


class Nowhere(SshHost):
    """A host that is not there."""

    def run(self, script: str, stdin: bytes | Iterable[bytes] = b"", timeout_s: float = 60.0) -> tuple[int, bytes, str]:
        raise UnreachableError("nobody answers")


@pytest.fixture
def here(tmp_path: Path) -> Site:
    """One host of two ranks; the home there has a blank and a quote in its name."""
    site = site_of("127.0.0.1:2", "", "", python=sys.executable)
    return with_hosts(site, tmp_path / "my 'home'")


def test_hosts_by_name_user_and_ranks() -> None:
    site = site_of("a,b:4,me@c", "", "2")
    assert site.logins == [Login("a", "a"), Login("b", "b"), Login("c", "c", "me")]
    assert {name: int(variables["slots"]) for name, variables in site.variables.items()} == {"a": 2, "b": 4, "c": 2}


def test_hosts_of_an_inventory_with_their_ssh_variables(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(
        "all:\n  vars:\n    ansible_user: admin\n    muster_device: cpu\n"
        "    ansible_ssh_private_key_file: '{{ inventory_dir }}/key'\n"
        "    ansible_ssh_common_args: \"-F '{{ inventory_dir }}/my config'\"\n"
        "nodes:\n  hosts:\n    b: {ansible_host: 192.0.2.2, ansible_port: 2222, slots: 4}\n    a:\n"
    )
    site = site_of("", str(tmp_path / "hosts.yml"), "2")
    key, config = str(tmp_path / "key"), tmp_path / "my config"
    assert site.logins == [
        Login("b", "192.0.2.2", "admin", 2222, key, config), Login("a", "a", "admin", None, key, config),
    ]  # fmt: skip
    assert [int(site.variables[name]["slots"]) for name in "ba"] == [4, 2]
    assert site.usual("muster_device", "auto") == "cpu"
    assert site.usual("muster_image", "muster:cpu") == "muster:cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("", "", ""), "give either --hosts a,b (in rank order), or --inventory FILE"),
        (("a", "b", ""), "give either --hosts"),
        (("a,a", "", ""), "--hosts: a is there twice"),
        (("a,,b", "", ""), "there is an empty name"),
        (("a", "", "two"), "--nproc: 'two' must be a whole number of ranks"),
        (("a", "", "", "/nowhere"), "--ssh-config: there is no file /nowhere"),
        (("", "/nowhere", ""), "--inventory: cannot read /nowhere"),
    ],
)
def test_hosts_that_cannot_be(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        site_of(*given)


def test_an_inventory_with_templates_or_ssh_options_is_refused_with_both_named(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(
        "nodes:\n  vars: {slots: 1}\n"
        "  hosts:\n    a: {ansible_user: '{{ me }}'}\n    b: {ansible_ssh_common_args: -o A=b}\n"
    )
    with pytest.raises(UsageError) as caught:
        site_of("", str(tmp_path / "hosts.yml"), "")
    assert len(caught.value.problems) == 2
    assert "ansible_user of a is a template" in caught.value.problems[0]
    assert "ansible_ssh_common_args of b: of ssh's options only -F FILE is known here" in caught.value.problems[1]


def test_the_plan_shows_each_hosts_command() -> None:
    shown = ssh.dry_run(site_of("a:2,b", "", "1"), {"script": ["echo", "a b"]}, lambda words, size: [])
    commands = re.findall(r"^# on (\w), .*\n(.*)$", shown, re.MULTILINE)
    assert [name for name, _ in commands] == ["a", "b"]
    assert all(words.startswith("~/muster/venv/bin/python -m train node ") for _, words in commands)
    for rank, (_, words) in enumerate(commands):
        assert f" --node-rank {rank} --nproc-per-node 2,1 --master-addr a " in words
        assert words.endswith(" -- echo 'a b'")


def test_a_launch_from_first_look_to_results(here: Site, tmp_path: Path) -> None:
    words = ["it's", "$(touch injected)", "a\nb"]
    command = ["sh", "-c", 'echo "rank $RANK of $WORLD_SIZE: $ODD"; printf "<%s>" "$@"; echo', "sh", *words]
    code, said = launched(here, tmp_path / "results", *command, run_id="mine", env={"ODD": "it's; $(touch injected)"})
    assert code == 0, said
    assert "rank 1 of 2: it's; $(touch injected)" in said
    assert "<it's><$(touch injected)>" in said
    assert said.splitlines()[-1] == "muster: finished (exit code 0: finished)"
    run = tmp_path / "results" / "mine"
    assert json.loads((run / "verdict.json").read_text())["exit_code"] == 0
    assert (run / "logs" / "node0-127.0.0.1" / "console").exists()
    home = tmp_path / "my 'home'" / "muster"
    assert len(list(home.glob("code-*/train/__main__.py"))) == 1
    assert list(home.rglob("secret")) == [], "it goes once it was read"
    assert not list(tmp_path.rglob("injected"))


def test_a_rank_that_fails_gives_the_exit_code(here: Site, tmp_path: Path) -> None:
    code, said = launched(here, tmp_path / "results", "sh", "-c", "exit $RANK")
    assert code == 5, said
    assert re.search(r"rank 1 \(127\.0\.0\.1.*\) .*1.*\(exit code 5: a rank failed\)$", said.splitlines()[-1])


def test_ctrl_c_saves_and_stops(here: Site, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not list(tmp_path.rglob("up")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    up = tmp_path / "up"
    code, said = launched(here, tmp_path, "sh", "-c", f"trap 'exit 0' TERM; touch {up}; while :; do sleep 0.1; done")
    assert code == 75, said
    assert said.splitlines()[-1].startswith("muster: stopped by Ctrl-C, saved: ")


def test_ctrl_c_while_results_are_brought_leaves_them_where_they_are(here: Site, tmp_path: Path) -> None:
    results = tmp_path / "results"

    def interrupt() -> None:
        while not list(results.rglob(".big.*.part")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    big = f"truncate -s 1G '{tmp_path}/my '\\''home'\\'/muster/runs/mine/big"
    code, said = launched(here, results, "sh", "-c", big, run_id="mine")
    thread.join(10)
    assert code == 0, said
    *_, rest, host, where, last = said.splitlines()
    launch_id = re.findall(r"muster: the rest is still there: fab collect --launch (\S+)", rest)[0]
    assert host.startswith("muster: 127.0.0.1: not all could be brought: ")
    assert where == "muster: there are no results"
    assert last == "muster: finished (exit code 0: finished)"
    assert not list(results.rglob("*.part"))
    with_hosts(here, tmp_path / "my 'home'")
    (tmp_path / "my 'home'" / "muster" / "runs" / "mine" / "big").write_text("small now")
    lines, is_whole = ssh_later.collect(here, launch_id, "", results, checkpoints=True)
    assert is_whole, lines
    assert (results / "mine" / "big").read_text() == "small now"


def test_one_that_was_detached_is_seen_and_stopped(here: Site, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    code, said = launched(here, tmp_path, "sh", "-c", script, detach="true", run_id="alone")
    assert code == 0, said
    launch_id = re.findall(r"launch (\S+) goes on by itself", said)[0]
    again, refused = launched(here, tmp_path, "true")
    assert again == 3
    assert f"127.0.0.1: it is in use by launch {launch_id}" in refused
    assert any(launch_id in row for row in ssh_later.status(here, all_of_them=False))
    told = ssh_later.stop(here, "", "")
    assert told["is_good"], told
    assert f"launch {launch_id}: stopped by fab stop" in told["lines"][0]
    assert "bye" in ssh_later.log_of(here, launch_id, "", 1, 5)
    lines, is_whole = ssh_later.collect(here, launch_id, "", tmp_path / "results", checkpoints=True)
    assert is_whole, lines
    assert "bye" in (tmp_path / "results/alone/logs/node0-127.0.0.1/rank0.log").read_text()


def test_a_host_that_is_not_there_and_nothing_is_started(here: Site, tmp_path: Path) -> None:
    site = site_of("127.0.0.2:1,192.0.2.9", "", "1", home=str(tmp_path), python=sys.executable)
    site.hosts = {"127.0.0.2": Here(site.logins[0]), "192.0.2.9": Nowhere(site.logins[1])}
    site.variables["127.0.0.2"]["address"] = "192.0.2.8"
    code, said = launched(site, tmp_path, "true")
    assert code == 3
    assert said.splitlines()[1:] == ["  192.0.2.9 cannot be reached: nobody answers"]
    assert not list(tmp_path.rglob("launch.json"))


def test_an_sshd_that_says_no_word_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_host, "CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        host = SshHost(Login("a", "127.0.0.1", "me", port, config=Path(os.devnull)))
        began_s = time.monotonic()
        with pytest.raises(UnreachableError, match=rf"\[127.0.0.1\]:{port} takes connections, but has not talked SSH"):
            host.connect()
        assert time.monotonic() - began_s < 10
    with pytest.raises(UnreachableError, match="Connection refused"):
        host.connect()


def test_a_command_whose_code_cannot_be_sent_is_not_started(here: Site, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "mine.py").touch()
    launches = tmp_path / "my 'home'" / "muster" / "launches"
    launches.mkdir(parents=True)
    (launches / "code").touch()  # a file where a folder is to be
    code, said = launched(here, tmp_path / "results", "true", code=str(tmp_path / "project"))
    assert code == 3, said
    assert re.search(r"^  127\.0\.0\.1: the code could not be sent: .*Not a directory", said, re.MULTILINE), said
    assert not list(launches.glob("*/launch.json"))
    (launches / "code").unlink()
    code, said = launched(here, tmp_path / "results", "ls", code=str(tmp_path / "project"))
    assert code == 0, said
    assert "rank 0 | mine.py" in said
    assert [path.name for path in (launches / "code").glob("*.*")] == [], "nothing half made is left"


def test_a_host_without_an_environment_is_told_so(tmp_path: Path) -> None:
    site = with_hosts(site_of("127.0.0.1", "", "", python="/nowhere/bin/python"), tmp_path)
    code, said = launched(site, tmp_path, "true")
    assert code == 3
    assert (
        "127.0.0.1: no Python environment in /nowhere: make one there, or say --python PATH, or --runtime docker"
        in said
    )


def test_preflight_tells_that_a_host_is_fit(here: Site, tmp_path: Path) -> None:
    words, code = ssh_preflight.preflight(here, "venv", "cpu")
    assert code == 0, words
    assert re.fullmatch(r"muster: 1 host is fit.* \([0-9.]+ s; exit code 0: finished\)", words.splitlines()[-1])
    assert list(tmp_path.rglob("secret")) == []


def test_preflight_puts_an_unfit_host_into_quarantine_and_a_launch_leaves_it_out(here: Site, tmp_path: Path) -> None:
    file = tmp_path / "bad hosts"
    words, code = ssh_preflight.preflight(here, "venv", "cpu", ["--min-shm-mb", "99999999"], str(file))
    assert code == 3, words
    assert "shared memory" in words
    assert words.splitlines()[-2] == f"muster: 127.0.0.1 added to {file}"
    code, said = launched(here, tmp_path / "results", "true", quarantine=str(file))
    assert code == 2
    assert f"all of 127.0.0.1 are in {file}" in said
    with pytest.raises(UsageError, match="unrecognized arguments"):
        ssh_preflight.preflight(here, "venv", "cpu", ["--min-shm", "1"])


def test_the_line_that_says_why() -> None:
    tar = "tar: a: Wrote only 5632 of 7582 bytes\ntar: Exiting with failure status due to previous errors\n"
    assert ssh_host.reason_in(tar) == "the disk is full: No space left on device"
    denied = "tar: b: Cannot open: Permission denied"
    assert ssh_host.reason_in(f"\nmotd\n{denied}\n") == denied
    assert ssh_host.reason_in("first\nsecond\n") == "first"
    assert ssh_host.reason_in(" \n") == ""


def test_remedies_are_fabs_own() -> None:
    told = {"problems": ["no image muster:x: run provision.yml", "no folder /r for runs: run provision.yml"]}
    assert own_words(told)["problems"] == [
        "no image muster:x: fab push --image muster:x", "no folder /r for runs: see README.md, With SSH alone",
    ]  # fmt: skip
    probe = {"problems": [], "gpus": 0, "gpu_files": 0, "launches": [{"id": "i", "by": "ann", "since": 0}]}
    ours = {name: getattr(FAB, name) for name in FAB.__dataclass_fields__}
    theirs = {name: getattr(ANSIBLE, name) for name in ours}
    request_of = {"hosts": {"a": {"slots": 1}, "b": {"slots": 1}}, "share": False}
    said = [
        *fitness.unfit({"a": {**probe, "image": "1"}, "b": {**probe, "image": "2"}}, request_of, "cuda", FAB),
        *request.device_of("auto", {"a": 1, "b": 0}, FAB)[1],
        ending.verdict(["a"], {"a": {"failed": True, "msg": "it is in use by ann"}}, FAB)["words"],
        *request.launch({"overrides": "--run-id x --runs-dir y"}, ["a"], {"a": {}}, "", remedies=FAB)["problems"],
    ]  # fmt: skip
    told_at_once = "\n".join(said)
    assert not any(words in told_at_once for words in theirs.values() if words not in ours.values()), told_at_once
    assert all(words in told_at_once for name, words in ours.items() if name not in ("make_environment", "bring_image"))
