"""What launchers do on a host (ansible/roles/job/module_utils): secrets that pass, folders that stay, dead disks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT

SOURCES = ROOT / "ansible" / "roles" / "job" / "module_utils"
SECRET = "0123456789abcdef-of-a-test"
ID = "20260102-030405-abcd"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module muster_states, as a host gets it; `launch` is the other one."""
    made: dict[str, types.ModuleType] = {}
    for name in ("muster_launch", "muster_states"):
        full = f"ansible.module_utils.{name}"
        made[name] = types.ModuleType(full)
        for above in ("ansible", "ansible.module_utils"):
            monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
        monkeypatch.setitem(sys.modules, "ansible.module_utils.muster_launch", made["muster_launch"])
        exec(compile((SOURCES / f"{name}.py").read_text(), full, "exec"), made[name].__dict__)
    made["muster_states"].launch = made["muster_launch"]  # type: ignore[attr-defined]
    return made["muster_states"]


def given(base: Path, **more: Any) -> dict[str, Any]:
    """What a launch tells a host: this one, without containers and systemd."""
    told = {
        "launch": ID, "by": "a test", "runtime": "venv", "python": sys.executable, "home": str(ROOT), "image": "none",
        "uid": os.getuid(), "gid": os.getgid(), "watcher": [os.getuid(), os.getgid()], "runs": str(base / "runs"),
        "arguments": ["--standalone", "--nproc-per-node", "1"], "command": ["sh", "-c", "true"], "about": {},
        "files": {}, "secret": SECRET, "gpus": 0, "share": False, "environment": {}, "mounts": [], "options": [],
        "code": "", "wait_s": 30, "run_id": "",
    }  # fmt: skip
    return {**told, **more}


@contextlib.contextmanager
def dead_mount(folder: Path) -> Iterator[None]:
    """A file system whose server never answers: whoever looks at it waits until it is gone."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead", os.fsencode(folder), b"fuse", 0, options):
        os.close(server)
        pytest.skip(f"no mount here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(server)  # whoever waits is let go
        libc.umount2(os.fsencode(folder), 2)


def test_a_dead_file_system_is_a_finding_and_not_a_wait_for_ever(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "FILES_S", 1.0)
    monkeypatch.setattr(host.bounded, "__defaults__", (1.0,))
    runs = tmp_path / "runs"
    runs.mkdir()
    told: list[dict[str, Any]] = []
    with dead_mount(runs):
        looking = threading.Thread(target=lambda: told.append(host.probe(given(tmp_path), tmp_path)), daemon=True)
        looking.start()
        looking.join(20)
        assert told, "it still waits"
    assert [problem for problem in told[0]["problems"] if problem.startswith(f"{runs} has not answered for 1 s: ")]
    assert told[0]["free_mb"] is None
    assert "launches" in told[0]


def test_a_look_at_files_tells_what_it_saw_or_why_not(host: Any, tmp_path: Path) -> None:
    assert host.bounded(tmp_path, lambda: [1, "ü"]) == [1, "ü"]
    assert len(host.bounded(tmp_path, lambda: "x" * 1_000_000)) == 1_000_000
    with pytest.raises(host.RefusalError, match="No such file"):
        host.bounded(tmp_path, lambda: (tmp_path / "none").stat().st_size)
    with pytest.raises(host.RefusalError, match="could not be looked at"):
        host.bounded(tmp_path, lambda: os._exit(0))


def test_the_secret_goes_by_a_pipe_and_its_file_before_anything_is_loaded(host: Any, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    show = f'read -r word; echo "<$word>"; ls {tmp_path}; env'
    words = ["sh", "-c", host.launch.TRAMPOLINE, "sh", str(tmp_path), "sh", "-c", show]
    env = {**os.environ, "word": "somebody else's"}
    said = subprocess.run(words, env=env, capture_output=True, text=True, timeout=20, check=True).stdout
    shown = (tmp_path / "console").read_text()
    assert shown.splitlines()[0] == f"<{SECRET}>"
    assert "secret" not in shown.splitlines()
    assert shown.count(SECRET) == 1, "in the environment"
    assert SECRET not in said


def test_a_secret_that_a_launcher_left_when_it_died_goes_with_the_next_launch(host: Any, tmp_path: Path) -> None:
    for number, name in enumerate(("secret", "environment")):
        left = tmp_path / f"20260101-00000{number}-aaaa" / name
        left.parent.mkdir()
        left.write_text("left")
    (left.parent / "launch.json").write_text(json.dumps({"id": left.parent.name, "since": 0}))
    assert host.start(given(tmp_path), tmp_path)["is_up"]
    assert list(tmp_path.glob("*/secret")) == list(tmp_path.glob("*/environment")) == []
    assert host.end(given(tmp_path), tmp_path)["exit_code"] == 0


def test_a_module_that_is_sent_again_does_no_harm_to_what_it_started(host: Any, tmp_path: Path) -> None:
    """As Ansible does where a connection breaks."""
    code = code_of(tmp_path, ID)
    told = given(tmp_path, code=str(code), command=["sh", "-c", "while :; do sleep 0.1; done"], share=True)
    assert host.start(told, tmp_path) == {"changed": True, "is_up": True}
    assert host.start(told, tmp_path) == {"changed": False, "is_up": True}
    assert host.is_running(tmp_path / ID)
    assert code.exists()
    assert host.end({**told, "wait_s": 0}, tmp_path)["killed"]
    with pytest.raises(host.RefusalError, match="was started here, and has ended"):
        host.start(told, tmp_path)


def code_of(base: Path, launch: str) -> Path:
    folder = base / "code" / launch
    folder.mkdir(parents=True)
    (folder / "my.py").touch()
    return folder


def test_code_does_not_stay_where_its_launch_was_refused(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "launches", lambda base: [{"id": "x", "running": True, "by": "ann", "since": 0}])
    code = code_of(tmp_path, ID)
    with pytest.raises(host.RefusalError, match="it is in use by launch x of ann"):
        host.start(given(tmp_path, code=str(code)), tmp_path)
    assert not code.exists()


def test_code_does_not_stay_where_the_agent_could_not_be_started(host: Any, tmp_path: Path) -> None:
    code = code_of(tmp_path, ID)
    with pytest.raises(FileNotFoundError):
        host.start(given(tmp_path, code="/nowhere"), tmp_path)
    assert not code.exists()
    assert list(tmp_path.glob("*/secret")) == []


def test_code_does_not_stay_where_no_rank_was_ever_started(host: Any, tmp_path: Path) -> None:
    code = code_of(tmp_path, ID)
    host.start(given(tmp_path, code=str(code), python="/nowhere/python"), tmp_path)
    assert host.end(given(tmp_path), tmp_path)["exit_code"] == 127
    assert not code.exists()


def test_code_whose_launch_nobody_knows_goes_and_what_may_be_sent_right_now_stays(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = code_of(tmp_path, "20260101-000000-bbbb")
    host.tidy_up(tmp_path, [], ID)
    assert stray.exists()
    monkeypatch.setattr(host, "STRAY_S", -1.0)
    own, known = code_of(tmp_path, ID), code_of(tmp_path, "20260101-000000-cccc")
    host.tidy_up(tmp_path, [{"id": known.name, "running": True}], ID)
    assert (stray.exists(), own.exists(), known.exists()) == (False, True, True)


ODD = {"PLAIN": "hidden-1 # 'x' $HOME ", "LINES": "hidden-2\nhidden-3", "NUMBER": 1}


def test_a_sites_variables_are_in_no_command_line(host: Any, tmp_path: Path) -> None:
    told = given(tmp_path, environment={**ODD, "MUSTER_RUNS_DIR": "/mine"})
    for runtime in ("docker", "venv"):
        agent = host.Agent(tmp_path, f"{ID}-{runtime}")
        agent.folder.mkdir()
        words, passed_on = agent._docker(told) if runtime == "docker" else (agent._systemd(told), {})
        assert "hidden" not in " ".join(words)
        assert "MUSTER_RUNS_DIR=" not in " ".join(words), "the site's own counts"
        file = agent.folder / "environment"
        assert file.stat().st_mode & 0o777 == 0o600
        if runtime == "docker":
            assert file.read_text() == "PLAIN=hidden-1 # 'x' $HOME \nNUMBER=1\nMUSTER_RUNS_DIR=/mine\n"
            assert passed_on == {"LINES": "hidden-2\nhidden-3"}
            assert words[words.index("LINES") - 1] == "--env"
        else:
            assert 'LINES="hidden-2\nhidden-3"\n' in file.read_text()
            assert "PLAIN=\"hidden-1 # 'x' \\$HOME \"\n" in file.read_text()


def test_a_rank_sees_a_sites_variables(host: Any, tmp_path: Path) -> None:
    show = f'printf "%s|%s|%s" "$PLAIN" "$LINES" "$NUMBER" >{tmp_path}/shown'
    host.start(given(tmp_path, environment=ODD, command=["sh", "-c", show]), tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "shown").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert host.end(given(tmp_path), tmp_path)["exit_code"] == 0
    assert (tmp_path / "shown").read_text() == f"{ODD['PLAIN']}|{ODD['LINES']}|1"
