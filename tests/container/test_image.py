"""What is in the image, what is not, and what its entrypoint refuses."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.container.cluster import sh
from tests.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for the image

LARGEST = 1.3e9
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+) ", (ROOT / "docker/locks/cpu.txt").read_text(), re.MULTILINE))


def run(image: str, *options: str, command: str = "id -u", code: int = 0) -> str:
    """What a container says; its exit code must be the one given."""
    done = subprocess.run(
        ["docker", "run", "--rm", *options, image, "sh", "-c", command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_is_small(image: str) -> None:
    size = int(sh("docker", "image", "inspect", "--format", "{{.Size}}", image))
    layers = sh("docker", "history", "--format", "{{.Size}}\t{{.CreatedBy}}", image)
    print(f"{size / 1e9:.2f} GB")
    assert size <= LARGEST, f"{size / 1e9:.2f} GB; its layers:\n{layers}"


def test_it_says_what_it_is(image: str) -> None:
    config = json.loads(sh("docker", "image", "inspect", "--format", "{{json .Config}}", image))
    environment = dict(pair.split("=", 1) for pair in config["Env"])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", config["User"])  # a number, and not root
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "healthcheck"]
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["PYTORCH_VERSION"] == LOCKED["torch"].removesuffix("+cpu")
    prefix = "org.opencontainers.image."
    assert config["Labels"][f"{prefix}licenses"] == "Apache-2.0"
    assert sh("git", "-C", str(ROOT), "cat-file", "-t", config["Labels"][f"{prefix}revision"]) == "commit"
    assert {f"{prefix}title", f"{prefix}description", f"{prefix}base.name"} <= set(config["Labels"])


def test_it_holds_no_secret_cache_repository_or_test(image: str) -> None:
    asked = " 2>/dev/null; ".join([
        "find /run/secrets /etc/pip.conf /root/.cache /root/.config /wheels /given /locks -type f",
        r"find / -xdev -not -path '/usr/share/*' \( -name .git -o -name '*.whl' -o -path '/opt/muster/tests*' \)",
        "find /var/lib/apt/lists /var/cache/apt -type f; ls -A /opt/muster /runs; ls /opt/venv/bin | grep -x pip; true",
    ])  # fmt: skip
    said = run(image, "--user", "0", "--entrypoint=", command=asked)
    assert said.split() == ["/opt/muster:", "train", "/runs:"]
    history = sh("docker", "history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "BEGIN CERTIFICATE" not in history


def test_its_bill_of_materials_is_valid_and_whole(image: str) -> None:
    text = (ROOT / "build" / "sbom-cpu.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = json.loads(text)["components"]
    python = {c["name"].lower().replace("_", "-"): c["version"] for c in components if c["purl"].startswith("pkg:pypi")}
    assert python == LOCKED
    assert {"libc6", "python3", "tini"} <= {c["name"] for c in components if c["purl"].startswith("pkg:deb/debian/")}


def test_started_as_root_it_becomes_the_owner_of_the_run_folder(image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "runs").mkdir()
    sh("chown", "12345:54321", str(tmp_path / "runs"))
    said = run(
        image, "--user", "0", "--cap-drop", "ALL", "--cap-add", "SETUID", "--cap-add", "SETGID", "--volume",
        f"{tmp_path}/runs:/runs", command="grep -hE '^(Name|Uid|Gid|Groups|CapEff):' /proc/1/status",
    )  # fmt: skip
    assert "runs in /runs as user 12345" in said
    facts = dict(line.split(":", 1) for line in said.splitlines() if re.match(r"\w+:\t", line))
    assert facts["Name"].strip() == "tini"
    assert facts["Uid"].split() == ["12345"] * 4
    assert facts["Gid"].split() == ["54321"] * 4
    assert facts["Groups"].split() == []
    assert int(facts["CapEff"], 16) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shm-size", "64m", "--env", "MUSTER_SHM_MB=128"], "/dev/shm has 64 MB, MUSTER_SHM_MB asks for 128"),
        (["--env", "MUSTER_GPUS=2"], "MUSTER_GPUS asks for 2 GPUs, the container sees 0"),
        (["--user", "777"], "user 777 cannot write the run folder /runs, which belongs to user 10001"),
        (["--env", "MUSTER_RUNS_DIR=/none"], "there is no run folder /none"),
    ],
    ids=["shared memory", "GPUs", "a run folder of somebody else", "no run folder"],
)
def test_it_refuses_what_was_promised_and_is_not_there(image: str, options: list[str], words: str) -> None:
    said = run(image, *options, code=3)
    assert words in said
    assert len(said.strip().splitlines()) == 1, said


def test_it_says_in_one_line_what_it_found(image: str) -> None:
    said = run(image, "--hostname", "h", "--shm-size", "128m", "--env", "OMP_NUM_THREADS=1", command="true")
    torch = LOCKED["torch"].removesuffix("+cpu")
    assert re.fullmatch(rf"h: \d+ CPUs, 0 GPUs, /dev/shm 128 MB, runs in /runs as user 10001, torch {torch}\n", said)


def test_a_stop_reaches_the_command_at_once(image: str) -> None:
    name = sh("docker", "run", "--detach", image, "sleep", "1000")
    try:
        time.sleep(0.5)
        started = time.monotonic()
        sh("docker", "stop", "--time", "30", name)
        assert time.monotonic() - started < 5
    finally:
        sh("docker", "rm", "--force", name)


def test_hosts_agree_on_one_secret_and_nobody_prints_it(image: str) -> None:
    volume = sh("docker", "volume", "create", "--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", "o=mode=1777")
    options = ["--volume", f"{volume}:/secret", "--env", "MUSTER_SECRET_DIR=/secret", "--user", "0"]
    names = [sh("docker", "run", "--detach", *options, image, "sleep", "30") for _ in range(3)]
    try:
        time.sleep(1)
        show = ("sh", "-c", "ls -l /secret | tail -n +2; cat /secret/*")
        seen = {sh("docker", "exec", "--user", "10001", name, *show) for name in names}
        assert len(seen) == 1
        listing, secret = seen.pop().splitlines()
        assert listing.startswith("-rw------- 1 10001 10001")
        assert listing.endswith(" 10001")  # the file's name: one for each user, so that nobody meets another's
        assert len(secret) == 44
        assert all(secret not in sh("docker", "logs", name) for name in names)
    finally:
        sh("docker", "rm", "--force", *names)
        sh("docker", "volume", "rm", volume)


def test_health_is_the_age_of_the_heartbeat(image: str) -> None:
    said = run(
        image, "--entrypoint=",
        command="healthcheck; echo $?; mkdir /runs/a; touch /runs/a/metrics.jsonl; healthcheck; echo $?;"
        " touch -d '-5 minutes' /tmp/heartbeat; healthcheck; echo $?; touch /tmp/heartbeat; healthcheck; echo $?",
    )  # fmt: skip
    assert said.split() == ["1", "0", "1", "0"]
