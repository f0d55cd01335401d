"""The folder of a user's code, as it is sent to hosts."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from train.errors import UsageError
from train.launch import pack
from train.launch.pack import pack as pack_folder


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def unpacked(archive: Path, folder: Path) -> Path:
    """As hosts do it."""
    folder.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    return folder


def test_code_is_packed_and_what_is_none_is_left_out_and_told(tmp_path: Path) -> None:
    code = tmp_path / "my code"
    write(code, "my job.py", "lib/one.py", ".git/HEAD", "runs/x/metrics.jsonl", "lib/__pycache__/one.pyc", ".env")
    left_out = pack_folder(code, tmp_path / "code.tgz")
    with tarfile.open(tmp_path / "code.tgz") as packed:
        assert sorted(packed.getnames()) == [".env", "lib/one.py", "my job.py"]
    assert left_out == ["runs (results of runs)", ".git", "__pycache__"]


def test_a_package_that_is_called_runs_is_code(tmp_path: Path) -> None:
    code = tmp_path / "code"
    write(code, "runs/__init__.py", "runs/fast/plan.py", "lib/runs/x/metrics.jsonl")
    assert pack_folder(code, tmp_path / "code.tgz") == []
    with tarfile.open(tmp_path / "code.tgz") as packed:
        assert sorted(packed.getnames()) == ["lib/runs/x/metrics.jsonl", "runs/__init__.py", "runs/fast/plan.py"]


def test_links_lead_to_the_same_on_a_host(tmp_path: Path) -> None:
    """Within the folder they stay links, loops included; a file from outside comes along; the rest is told."""
    code, outside = tmp_path / "code", tmp_path / "outside"
    write(code, "src/lib/one.py", "job.py", ".venv/bin/python")
    write(outside, "shared.py", "data/large")
    links: dict[str, str | Path] = {
        "lib": "src/lib", "src/up": "..", "again.py": code / "job.py", "src/lib/itself": "itself",
        "shared.py": outside / "shared.py", "python": ".venv/bin/python", "data": outside / "data", "broken": "nowhere",
    }  # fmt: skip
    for name, target in links.items():
        (code / name).symlink_to(target)
    (tmp_path / "by another name").symlink_to(code)
    left_out = pack_folder(tmp_path / "by another name", tmp_path / "code.tgz")
    code.rename(tmp_path / "elsewhere")
    outside.rename(tmp_path / "gone")
    there = unpacked(tmp_path / "code.tgz", tmp_path / "host")
    assert (there / "lib" / "one.py").read_text() == "src/lib/one.py"
    assert (there / "src" / "up" / "job.py").read_text() == (there / "again.py").read_text() == "job.py"
    assert (there / "shared.py").read_text() == "shared.py"
    assert (there / "python").read_text() == ".venv/bin/python"
    assert not any((there / name).exists() for name in ("data", "broken", ".venv"))
    assert left_out == [
        "broken (a link to nothing: nowhere)",
        f"data (a link to a folder outside: {outside}/data)",
        "src/lib/itself (a link to nothing: itself)",
        ".venv",
    ]


def test_no_folder_and_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nowhere is no folder"):
        pack_folder(tmp_path / "nowhere", tmp_path / "code.tgz")
    monkeypatch.setattr(pack, "MOST_BYTES", 1 << 20)
    (tmp_path / "data.bin").write_bytes(bytes(3 << 20))
    with pytest.raises(UsageError, match="holds 3 MB, and more than 1 are not sent"):
        pack_folder(tmp_path, tmp_path / "code.tgz")
    assert not (tmp_path / "code.tgz").exists()
