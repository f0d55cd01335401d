"""The folder of a user's code, as it is sent to hosts."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from train.errors import UsageError
from train.launch import pack
from train.launch.pack import pack as pack_folder


def test_code_is_packed_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    code = tmp_path / "my code"
    for name in ("my job.py", "lib/one.py", ".git/HEAD", "runs/x/metrics.jsonl", "lib/__pycache__/one.pyc", ".env"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    (code / "link").symlink_to("my job.py")
    (code / "broken").symlink_to("nowhere")
    pack_folder(code, tmp_path / "code.tgz")
    with tarfile.open(tmp_path / "code.tgz") as packed:
        assert sorted(packed.getnames()) == [".env", "lib/one.py", "link", "my job.py"]


def test_no_folder_and_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nowhere is no folder"):
        pack_folder(tmp_path / "nowhere", tmp_path / "code.tgz")
    monkeypatch.setattr(pack, "MOST_BYTES", 1 << 20)
    (tmp_path / "data.bin").write_bytes(bytes(3 << 20))
    with pytest.raises(UsageError, match="holds 3 MB, and more than 1 are not sent"):
        pack_folder(tmp_path, tmp_path / "code.tgz")
    assert not (tmp_path / "code.tgz").exists()
