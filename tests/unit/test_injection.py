"""Odd names, paths and words, given to every launcher: refused in words, or passed on as they are; never executed.

What needs no lab. On real hosts: tests/lab/test_conformance.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.container.cluster import compose_command
from tests.here import Here, launched, with_hosts
from tests.odd import ODD, ODD_NAMES
from tests.ranks import ROOT, clean_environment
from train.errors import UsageError
from train.launch import request, slurm, ssh_later
from train.launch.options import parse
from train.launch.plan import make_parser, plan_of
from train.launch.ssh_site import site_of
from train.launch.topology import Host, make_plan

ROLE = ROOT / "ansible/roles/job/module_utils"
SHOWS = 'import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if "ODD" in k}]))'


@pytest.fixture(autouse=True)
def _nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the folder where the odd words would make the file `canary`."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.parametrize("name", ODD_NAMES)
class TestNames:
    """Of hosts, users and runs: no launcher takes them."""

    def test_hosts_and_users_on_the_command_line(self, name: str) -> None:
        for hosts in (name, f"b,{name}", f"{name}@b" if "@" not in name else name):
            if not (hosts.endswith("@b") and name == "a\\b"):  # a user of a domain
                with pytest.raises(UsageError):
                    site_of(hosts, "", "1")

    @pytest.mark.parametrize("where", ["name", "ansible_host", "ansible_user", "muster_image"])
    def test_hosts_and_users_of_an_inventory(self, name: str, where: str, tmp_path: Path) -> None:
        host: dict[str, Any] = {"slots": 1, **({where: name} if where != "name" else {})}
        text = {"nodes": {"hosts": {name if where == "name" else "a": host}}}
        (tmp_path / "hosts.yml").write_text(json.dumps(text))  # which is YAML
        if (where, name) not in (("ansible_user", "a\\b"), ("muster_image", "a/../../x")):
            with pytest.raises(UsageError):
                site_of("", str(tmp_path / "hosts.yml"), "")
        if where in ("name", "ansible_host"):
            with pytest.raises(UsageError):
                plan_of(make_parser().parse_args(["--inventory", str(tmp_path / "hosts.yml")]), {})

    def test_hosts_for_ansible_and_slurm(self, name: str) -> None:
        with pytest.raises(UsageError):
            request.plan_from([name], {name: {"slots": 1}})
        with pytest.raises(UsageError):
            request.plan_from(["a"], {"a": {"slots": 1, "address": name}})
        with pytest.raises(UsageError):
            make_plan([Host(name, "a", 1)])

    def test_runs(self, name: str) -> None:
        asked = {"runtime": "venv", "device": "cpu", "run_id": name, "script": ["true"]}
        told = request.launch(asked, ["a"], {"a": {"slots": 1}}, "")
        assert any(repr(name) in problem for problem in told["problems"])
        with pytest.raises(UsageError, match="run-id"):
            parse(["--standalone", "--nproc-per-node", "1", "--run-id", name, "--", "true"], {})
        job = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1", "MUSTER_RUN_ID": name, "MUSTER_RUNS_DIR": "/r",
               "MUSTER_RUNTIME": "venv", "MUSTER_VENV": sys.prefix}  # fmt: skip
        with pytest.raises(UsageError, match="run-id"):
            slurm.job_of(job, str(ROOT), None, "")

    def test_folders_on_hosts_and_images(self, name: str) -> None:
        for option, words in (("home", "--home"), ("python", "--python"), ("image", "--image")):
            if not set(name) <= set("./ax"):
                with pytest.raises(UsageError, match=words):
                    site_of("a", "", "", **{option: name})


def test_runs_and_launches_that_are_looked_for_are_not_there(tmp_path: Path) -> None:
    name = "../$(touch canary)'; touch canary"
    here = with_hosts(site_of("127.0.0.1", "", ""), tmp_path / "home")
    for launch, run in (("", name), (name, "")):
        assert "nothing runs that is meant" in ssh_later.stop(here, launch, run)["lines"][0]
        with pytest.raises(UsageError, match="no such launch is known"):
            ssh_later.log_of(here, launch, run, None, 5)


def test_words_and_values_reach_the_ranks_of_a_launch_by_ssh_from_odd_folders(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s "q" $(touch canary) `touch canary`; touch canary\nä'
    for folder in ("home", "code", "results"):
        (odd / folder).mkdir(parents=True)
    (odd / "code" / "show.py").write_text(SHOWS)
    here = with_hosts(site_of("127.0.0.1", "", "", python=sys.executable), odd / "home")
    values = {f"ODD{number}": value for number, value in enumerate(ODD)}
    given = {"code": str(odd / "code"), "env": values}
    code, said = launched(here, odd / "results", sys.executable, "show.py", *ODD, **given)
    assert code == 0, said
    line = next(line for line in said.splitlines() if line.startswith("["))
    assert json.loads(line) == [ODD, values]


DOCKER = """#!{python}
import json, os, sys
if sys.argv[1:3] == ["image", "inspect"]:
    print("sha256:0")
elif sys.argv[1] == "run":
    words = sys.argv[2:]
    file = words[words.index("--env-file") + 1]
    variables = open(file, encoding="utf-8", errors="surrogateescape", newline="").read()
    json.dump([words, variables, dict(os.environ)], open({seen!r}, "w"))
    sys.exit("not today")
"""


def test_values_of_variables_are_in_no_command_line_of_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    docker, seen = tmp_path / "bin/docker", tmp_path / "seen"
    docker.write_text(DOCKER.format(python=sys.executable, seen=str(seen)))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    here = with_hosts(site_of("127.0.0.1", "", ""), tmp_path / "home")
    values = {f"ODD{number}": f"{value} of mine" for number, value in enumerate(ODD)}
    code, said = launched(here, tmp_path, "true", *ODD, runtime="docker", env=values)
    assert code == 3, said
    assert "not today" in said
    words, variables, environment = json.loads(seen.read_text())
    assert words[-len(ODD) :] == ODD
    before = words[: -len(ODD)]
    assert not any(" of mine" in word for word in before)
    found = dict(row.split("=", 1) for row in variables.split("\n")[:-1])
    long = [before[at + 1] for at, word in enumerate(before) if word == "--env" and "=" not in before[at + 1]]
    found |= {name: environment[name] for name in long}
    assert found == values
    assert long, "a value of several lines takes another way"


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Any:
    """muster_launch.py, as Ansible's module loads it."""
    module = types.ModuleType("muster_launch")
    exec(compile((ROLE / "muster_launch.py").read_text(), "muster_launch", "exec"), module.__dict__)
    return module


def given_words(agents: Any, runtime: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line by which Ansible's module starts an agent with odd words and values."""
    ran: list[list[str]] = []
    monkeypatch.setattr(agents, "run", lambda *words, **more: ran.append([*words]))
    agent = agents.Agent(folder, "20260101-000000-abcd")
    monkeypatch.setattr(agent, "_is_in", lambda runtime: None)
    agent.in_container, agent.in_unit = runtime == "docker", runtime == "venv"
    environment = {f"ODD{number}": value for number, value in enumerate(ODD)}
    agent.start({
        "runtime": runtime, "runs": "/runs", "home": "/opt/muster", "code": "", "command": ["true", *ODD],
        "options": [], "arguments": [], "environment": environment, "uid": os.getuid(), "gid": os.getgid(),
        "gpus": 0, "by": "ann",
        "watcher": [os.getuid(), os.getgid()], "launch": "20260101-000000-abcd", "about": {}, "secret": "s",
        "files": {}, "mounts": [], "image": "muster:cpu",
    })  # fmt: skip
    return ran[0]


@pytest.mark.parametrize("runtime", ["docker", "venv"])
def test_ansibles_module_hands_over_each_word_and_value_whole(
    agents: Any, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = given_words(agents, runtime, tmp_path, monkeypatch)
    dollars = (lambda word: word.replace("$", "$$")) if runtime == "venv" else str
    assert words[-len(ODD) :] == [dollars(word) for word in ODD]
    shell = words.index("sh")
    assert words[shell : shell + 2] == ["sh", "-c"]
    assert words[shell + 2] == dollars(agents.TRAMPOLINE), "no word of a user's is in what a shell reads"


@pytest.mark.parametrize("runtime", slurm.RUNTIMES)
def test_srun_gets_each_word_and_value_whole_and_so_does_the_agent(runtime: str, tmp_path: Path) -> None:
    variables = {f"NCCL_{number}": f"{value} of mine" for number, value in enumerate(ODD)}
    job = slurm.Job(
        plan=make_plan([Host("a", "a", 1)], run_id="x"), run_id="x", cpus=1, gpus=(0,), runtime=runtime, root="/m",
        runs_dir=f"{tmp_path}/{ODD[0]}", work_dir="/w", device="cpu", image="i", python="/p", variables=variables,
    )  # fmt: skip
    words = slurm.srun_words(job, ["true", *ODD])
    assert words[-len(ODD) :] == ODD
    at = words.index("-c")
    assert words[at + 1] == slurm.IN_STEP.strip(), "no word of a user's is in what a shell reads"
    if runtime in ("docker", "podman"):
        assert set(variables) <= set(words), "the client has their values from its own environment"
    assert not any(f"{value} of mine" in word for value in ODD for word in words)
    shows = [sys.executable, "-c", SHOWS, *words[at + 3 :]]
    done = subprocess.run(["sh", "-c", words[at + 1], "muster", *shows], input="", capture_output=True, text=True,
                          env=clean_environment(SLURM_NODEID="0"), check=True)  # fmt: skip
    assert json.loads(done.stdout)[0][-len(ODD) :] == ODD


FAKE = """#!{python}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def test_compose_hands_over_each_word_whole(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(FAKE.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    given = clean_environment(MUSTER_NODE_RANK="0", MUSTER_NPROC="$(touch canary)", MUSTER_RUNS_DIR="; touch canary")
    given["PATH"] = f"{tmp_path}:{given['PATH']}"
    command = [str(ROOT / "docker/launch"), "--config", *ODD]
    words = json.loads(subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout)
    assert words[-len(ODD) :] == ODD
    assert words[words.index("--nproc-per-node") + 1] == "$(touch canary)"
    assert words[words.index("--runs-dir") + 1] == "; touch canary"


def test_compose_reads_words_with_quotes_as_words(tmp_path: Path) -> None:
    quoted = "'a b' '$(touch canary)' '`touch canary`' '; touch canary' -x \"it's\" ä"
    command = [*compose_command(), "--project-directory", str(tmp_path), "-f", str(ROOT / "compose.yaml"), "config"]
    (tmp_path / "compose.yaml").write_text((ROOT / "compose.yaml").read_text())
    done = subprocess.run(
        command, env={**os.environ, "MUSTER_ARGS": quoted}, capture_output=True, text=True, check=False, timeout=60
    )
    if "unknown" in done.stderr or "not found" in done.stderr:
        pytest.skip(f"no Compose: {done.stderr}")
    assert done.returncode == 0, done.stderr
    import yaml

    words = yaml.safe_load(done.stdout.replace("$$", "$"))["services"]["node0"]["command"]
    assert (words if isinstance(words, list) else __import__("shlex").split(words))[-7:] == [
        "a b", "$(touch canary)", "`touch canary`", "; touch canary", "-x", "it's", "ä",
    ]  # fmt: skip


def test_a_home_that_is_odd_is_expanded_on_the_host_and_quoted(tmp_path: Path) -> None:
    here = with_hosts(site_of("127.0.0.1", "", ""), tmp_path / "$(touch canary)")
    assert here.ask("listed")["127.0.0.1"]["paths"]["folder"] == f"{tmp_path}/$(touch canary)/muster/launches"
    assert isinstance(here.hosts["127.0.0.1"], Here)
