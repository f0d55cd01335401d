"""What is in the image, what is not, and what its entrypoint refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.container.cluster import sh
from tests.container.conftest import IMAGE
from tests.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first waits for the image

LARGEST = 1.06e9
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+) ", (ROOT / "docker/locks/cpu.txt").read_text(), re.MULTILINE))


def run(image: str, *options: str, command: str = "id -u", code: int = 0, timeout_s: float = 60) -> str:
    """What a container says; its exit code must be the one given."""
    done = subprocess.run(
        ["docker", "run", "--rm", *options, image, "sh", "-c", command],
        capture_output=True, text=True, timeout=timeout_s, check=False,
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
    revision = config["Labels"][f"{prefix}revision"].removesuffix("-dirty")
    assert sh("git", "-C", str(ROOT), "cat-file", "-t", revision) == "commit"
    assert {f"{prefix}title", f"{prefix}description", f"{prefix}base.name"} <= set(config["Labels"])


def test_it_holds_no_secret_cache_repository_or_test(image: str) -> None:
    asked = " 2>/dev/null; ".join([
        "find /run/secrets /etc/pip.conf /root/.cache /root/.config /wheels /given /locks -type f",
        r"find / -xdev -not -path '/usr/share/*' \( -name .git -o -name '*.whl' -o -path '/opt/muster/tests*' \)",
        r"find /opt/venv -name '*.dist-info' -prune -o -type d \( -name tests -o -path '*/torch/test' \) -print",
        "find /var/lib/apt/lists /var/cache/apt /var/cache/debconf -type f",
        "ls -A /opt/muster /runs; ls /opt/venv/bin | grep -x pip; true",
    ])  # fmt: skip
    said = run(image, "--user", "0", "--entrypoint=", command=asked)
    assert said.split() == ["/opt/muster:", "train", "/runs:"]
    history = sh("docker", "history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "BEGIN CERTIFICATE" not in history


def test_nothing_misses_the_tests_of_packages(image: str) -> None:
    trains = "python -m train run --model.name linear --data.name regression --train.steps 2 --run_id two"
    needs = "python -c 'import numpy.testing, numpy.random, sympy, torch._dynamo, torch.testing, torch.onnx'"
    asks = "from urllib.request import urlopen; print(urlopen('http://localhost:6006/data/plugins_listing').read())"
    looks = f'for i in $(seq 60); do sleep 1; python -c "{asks}" 2>/dev/null && break; done'
    board = f"tensorboard --logdir /runs 2>/dev/null & {looks}"
    said = run(image, command=f"set -e; {trains}; {needs}; cat /runs/two/metrics.jsonl; {board}", timeout_s=240)
    assert '"step": 2, ' in said
    assert '"scalars"' in said


def test_a_clone_made_under_umask_077_lets_everybody_in(engine: None, tmp_path: Path) -> None:
    """The stage that holds what comes from the clone is enough, and takes seconds."""
    for name in ("Dockerfile", ".dockerignore"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("train", "docker"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.whl", "__pycache__"))
    sh("chmod", "-R", "go-rwx", str(tmp_path))
    base, image = "muster-base:bookworm", f"{IMAGE}-077"
    if not sh("docker", "images", "--quiet", base):
        sh(str(ROOT / "docker/lab/base-image.sh"), base, timeout_s=300)
    build = ["env", "DOCKER_BUILDKIT=1", sh(str(ROOT / "docker/find-docker")), "build", "--target", "program"]
    sh(*build, "--build-arg", f"BASE_IMAGE={base}", "--tag", image, str(tmp_path), timeout_s=300)
    try:
        closed = r"find /opt /usr/local \( -type d -not -perm -5 -o -not -perm -4 \) -print; "
        closed += "find /usr/local/bin -type f -not -perm -5 -print"
        assert run(image, "--user", "12345", command=closed) == ""
        assert run(image, command="ls /opt/muster/train/__pycache__/seam.*.pyc /usr/local/bin").split()[2:] == [
            "entrypoint", "healthcheck", "launch",
        ]  # fmt: skip
    finally:
        sh("docker", "image", "rm", "--force", image)


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
