"""`python -m train checkpoints` and `sample`: what a run has saved, as a user sees it."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import ROOT, clean_environment
from train import sample, shelf
from train.checkpoint import load

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `mine`: a tiny gpt on a text of its own, with checkpoints of steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    subprocess.run(
        [sys.executable, "-m", "train", "run", "--strategy.name", "baseline", "--model.layers", "1",
         "--model.width", "16", "--data.block_size", "8", "--data.val_fraction", "0.1",
         "--data.paths", f"[{folder / 'text.txt'}]", "--data.cache_dir", str(folder), "--batch.global_size", "4",
         "--train.steps", "5", "--train.save_every", "2", "--train.sample_tokens", "0",
         "--runs-dir", str(folder), "--run-id", "mine"],
        cwd=ROOT, env=clean_environment(), check=True, capture_output=True,
    )  # fmt: skip
    return folder


def test_ls_and_verify(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shelf.main(["ls", "mine", "--runs-dir", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "2", "4", "5"]
    assert [line.endswith("latest") for line in lines] == [False, False, False, True]
    assert shelf.main(["verify", str(runs / "mine")]) == 0
    said = capsys.readouterr().out
    assert said == "step-00000002: whole\nstep-00000004: whole\nstep-00000005: whole\n"


def test_verify_names_what_is_damaged(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["cp", "-r", runs / "mine", tmp_path], check=True)
    file = tmp_path / "mine" / "checkpoints" / "step-00000004" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    (tmp_path / "mine" / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    assert shelf.main(["verify", "mine", "--runs-dir", str(tmp_path)]) == 3
    two, four, five = capsys.readouterr().out.splitlines()
    assert two == "step-00000002: whole"
    assert f"{file} is damaged: {len(content)} bytes with hash" in four
    assert five.endswith("step-00000005 is not a whole checkpoint: it has no manifest.json")
    assert shelf.main(["ls", "mine", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("latest  no manifest: damaged")
    # What is exported is the newest whole one, and that is said.
    target = tmp_path / "w.safetensors"
    assert shelf.main(["export", "mine", "--runs-dir", str(tmp_path), "--output", str(target)]) == 0
    said = capsys.readouterr()
    assert "it has no manifest.json; taking step-00000002 instead" in said.err
    assert (
        load_file(target)["embedding.weight"].tolist()
        == load(tmp_path / "mine" / "checkpoints" / two.split(":")[0])["model"]["embedding.weight"].tolist()
    )
    assert shelf.main(["export", "mine", "--runs-dir", str(tmp_path), "--step", "4"]) == 3
    assert "is damaged" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_no_row_and_what_cannot_be_read_is_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["cp", "-r", runs / "mine", tmp_path], check=True)
    folder = tmp_path / "mine" / "checkpoints"
    for name in ("step-12x", "step-00000004.bak", "step-²", "step-1"):
        (folder / name).mkdir()
    shutil.rmtree(folder / "step-00000002")
    (folder / "step-00000002").write_text("a file")
    (folder / "latest").write_bytes(b"\xff")
    (folder / "step-00000005").rename(folder / ".replaced-step-00000005")  # as a save of step 5 anew leaves it killed
    (folder / "step-00000009").symlink_to(tmp_path / "nowhere")
    before = sorted(folder.rglob("*"))
    assert shelf.main(["ls", "mine", "--runs-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "2", "4", "5", "9"]
    assert "NotADirectoryError" in lines[1]
    assert lines[4].split() == ["9", "?", "it", "has", "no", "step-00000009"]
    assert shelf.main(["verify", "mine", "--runs-dir", str(tmp_path)]) == 3
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [f"step-0000000{step}" for step in (2, 4, 5, 9)]
    assert [line.endswith(": whole") for line in said] == [False, True, True, False]
    monkeypatch.chdir(tmp_path)
    assert shelf.main(["export", "mine", "--runs-dir", str(tmp_path), "--step", "5"]) == 0
    assert (tmp_path / "mine-step-00000005.safetensors").exists()
    assert sample.main(["mine", "--runs-dir", str(tmp_path), "--tokens", "3"]) == 0
    assert "step-00000009 is not a whole checkpoint" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
    monkeypatch.setattr(Path, "iterdir", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    for words in (["ls", "mine"], ["verify", "mine"], ["export", "mine"]):
        assert shelf.main([*words, "--runs-dir", str(tmp_path)]) == 3
        assert "checkpoints cannot be read: OSError: [Errno 5] Input/output error" in capsys.readouterr().err


def test_export_has_the_weights_and_sample_uses_them(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "w.safetensors"
    assert shelf.main(["export", "mine", "--runs-dir", str(runs), "--step", "4", "--output", str(target)]) == 0
    weights, saved = load_file(target), load(runs / "mine" / "checkpoints" / "step-00000004")["model"]
    assert set(weights) == set(saved)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert not list(tmp_path.glob(".*"))
    capsys.readouterr()
    written = []
    for source in ([str(target)], ["mine", "--runs-dir", str(runs), "--step", "4"], [str(target), "--seed", "1"]):
        assert sample.main([*source, "--prompt", "to be", "--tokens", "20"]) == 0
        written.append(capsys.readouterr().out)
    assert written[0].startswith("to be")
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize(
    ("command", "argv", "words"),
    [
        (shelf.main, ["ls", "other"], "no run 'other' in "),
        (shelf.main, ["export", "mine", "--step", "3"], "--step 3: run mine has no checkpoint of it; there are: 5, 4"),
        (shelf.main, ["export", "mine", "--output", "/nowhere/w"], "--output: cannot write /nowhere/w"),
        (sample.main, ["nothing.safetensors"], "nothing.safetensors is no file that `checkpoints export` made"),
        (sample.main, ["mine", "--tokens", "0"], "--tokens, --temperature: must be above 0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(
    command: object, argv: list[str], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*argv, "--runs-dir", str(runs)]) == 2  # type: ignore[operator]
    assert words in capsys.readouterr().err
