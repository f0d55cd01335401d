"""An engine, an image built from this tree without network, and a caller who is not root."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.cluster import Cluster, sh
from tests.ranks import ROOT

IMAGE = f"muster:test-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"  # another checkout builds its own


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine that answers. CI must have one: there its absence is a failure."""
    reason = "no docker client: install Docker"
    if shutil.which("docker"):
        answer = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
        reason = f"no Docker engine: {answer.stderr.strip()}" if answer.returncode else ""
    if reason and "CI" in os.environ:
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def build(**env: str) -> float:
    """`docker/build cpu` under the tests' own name; the seconds it took."""
    started = time.monotonic()
    done = subprocess.run(
        ["docker/build", "cpu", IMAGE], cwd=ROOT, env={**os.environ, **env}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return time.monotonic() - started


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """Built in two steps, as for an air-gapped site: wheels are fetched, then the image is built without network."""
    with (Path(tempfile.gettempdir()) / "muster-test-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of xdist builds the same
        wheels_s = build(WHEELS_ONLY="1")
        image_s = build(OFFLINE="1")
    print(f"wheels, with a base image where none was: {wheels_s:.0f} s; image, without network: {image_s:.0f} s")
    return IMAGE


@pytest.fixture(scope="session")
def caller(engine: None) -> Iterator[pwd.struct_passwd]:
    """Who calls Compose: an ordinary user who may use Docker. Made for this where the tests run as root."""
    if os.geteuid() != 0:
        yield pwd.getpwuid(os.geteuid())
        return
    name = f"muster{os.getpid()}"
    sh("useradd", "--create-home", "--groups", "docker", name)
    try:
        yield pwd.getpwnam(name)
    finally:
        sh("userdel", "--remove", name, check=False)


@pytest.fixture(scope="module")
def cluster(image: str, caller: pwd.struct_passwd) -> Iterator[Cluster]:
    """A fresh clone whose hosts are gone afterwards, whatever a test did."""
    made = Cluster(caller, image)
    try:
        yield made
    finally:
        made.remove()
