"""`python -m train drill`: a run that is killed again and again must end with the bits of one that was left alone."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from train.errors import UsageError
from train.seam import RUN_ID, RUNS_DIR, STATUS_PAGE, Exit

_EPILOG = """examples:
  python -m train drill --config ddp --kills 5 --train.steps 200
  python -m train drill --config ddp --kills 20 --seed 7 --nproc-per-node 4 --train.steps 400 --train.save_every 25

Faults come at random times, in start-up, training or saving, drawn from --seed: kill -9 of one rank, of the agent, or
of all processes at once; SIGTERM; a newest checkpoint with a flipped bit, cut short, or without its manifest.
Where a run ends before all faults were dealt, another is begun. Exit code: 0 proven, 1 not the same (a bug), 2 usage,
5 the run itself fails."""
_END_S = 120.0
_FLAGS = ("--train.log_samples", "true", "--train.tensorboard", "false", "--train.sample_tokens", "0")


@dataclass(frozen=True)
class Fault:
    """What was done to a run, and what came of it."""

    kind: str
    after_s: float
    """Seconds after the start."""
    step: int
    """Where the run stood, by its newest row."""
    ended_with: int
    """Exit status of the agent; negative: the signal that it died of."""


class NotTheSameError(Exception):
    """The proof has failed: what differs."""


def main(argv: Sequence[str]) -> int:
    """Run the drill, print the certificate and leave it as `drill.json`; an exit code."""
    options, rest = _parse(argv)
    folder = Path(options.runs_dir) / f"drill-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        _refuse_bad_config(rest, options.nproc_per_node)
        folder.mkdir(parents=True)
        print(f"drill: run folders in {folder}", flush=True)
        drill = Drill(folder, options.nproc_per_node, rest, random.Random(options.seed))  # noqa: S311 - not for secrets
        certificate = {"seed": options.seed, **drill.run(options.kills)}
    except UsageError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return Exit.USAGE
    except OSError as error:
        print(f"drill: cannot write {folder}: {error}", file=sys.stderr)
        return Exit.USAGE
    except NotTheSameError as error:
        print(
            f"drill: NOT the same: {error}\ndrill: the runs are kept in {folder}: please report this", file=sys.stderr
        )
        return Exit.BUG
    except KeyboardInterrupt:
        return Exit.STOPPED_UNSAVED
    if "failed" in certificate:
        print(f"drill: the run fails by itself: {certificate['failed']}", file=sys.stderr)
        return Exit.RANK_FAILED
    (folder / "drill.json").write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
    print(_in_words(certificate))
    return Exit.FINISHED


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m train drill",
        description="Prove on this machine that nothing is lost: the same training once untouched and once with random "
        "faults must end with the same weights, the same rows and the same samples. More options go to `run`.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--kills", type=_at_least_one, default=5, metavar="N", help="how many faults (5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="fixes the faults' kinds and times (0)")
    parser.add_argument("--nproc-per-node", type=_at_least_one, default=2, metavar="P", help="ranks (2)")
    parser.add_argument("--runs-dir", default=os.environ.get(RUNS_DIR) or "runs", help="where it may work (runs)")
    return parser.parse_known_args(argv)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _refuse_bad_config(rest: Sequence[str], world_size: int) -> None:
    from train.options import checked_config, split_launch_options

    given, flags = split_launch_options(rest)
    if given.run_id not in (None, os.environ.get(RUN_ID)) or given.resume != "auto":
        raise UsageError("--run-id, --resume: the drill chooses its own runs; leave them out")
    config = checked_config([*flags, *_FLAGS], world_size)
    if not config.train.save_every:
        raise UsageError(
            "train.save_every: 0 saves at the end only, and each kill would begin anew: give a number of steps"
        )


class Drill:
    """One training, run untouched and run disturbed."""

    def __init__(self, folder: Path, nproc: int, flags: Sequence[str], dice: random.Random) -> None:
        """
        Args:
            folder: for the run folders.
            nproc: ranks.
            flags: of `python -m train run`.
            dice: decides on faults and moments.
        """
        self._folder, self._nproc, self._flags, self._dice = folder, nproc, flags, dice
        self.faults: list[Fault] = []
        self._starts = 0

    def run(self, kills: int) -> dict[str, Any]:
        """The certificate's facts; with `failed` where the run fails untouched. Raises NotTheSameError."""
        began_s = time.monotonic()
        code = self._wait(self._start("untouched"))
        if code != Exit.FINISHED:
            return {"failed": _cause(self._folder / "untouched") or f"exit status {code}"}
        untouched_s = time.monotonic() - began_s
        print(f"drill: untouched: {untouched_s:.0f} s", flush=True)
        rounds = 0
        while len(self.faults) < kills:
            rounds += 1
            self._disturb(f"disturbed-{rounds}", kills, untouched_s)
            compare(self._folder / "untouched", self._folder / f"disturbed-{rounds}", self._nproc)
        samples, epochs = count_samples(self._folder / "untouched", self._nproc)
        return {
            "ranks": self._nproc,
            "faults": [asdict(fault) for fault in self.faults],
            "starts": self._starts,
            "weights_sha256": weights_hash(self._folder / "untouched"),
            "samples": samples,
            "epochs": epochs,
        }

    def _disturb(self, name: str, kills: int, untouched_s: float) -> None:
        """One run with faults until they are all dealt, or it ends before."""
        while True:
            began_s = time.monotonic()
            agent = self._start(name)
            if len(self.faults) == kills:
                code = self._wait(agent)
                if code != Exit.FINISHED:
                    raise NotTheSameError(f"{name} did not go on: {_cause(self._folder / name) or code}")
                return
            after_s = self._dice.uniform(0.0, 0.8 * untouched_s)
            try:
                code = agent.wait(after_s)
            except subprocess.TimeoutExpired:
                step = _newest_step(self._folder / name)
                kind = self._dice.choice(list(_FAULTS))
                _FAULTS[kind](agent, self._folder / name, self._dice)
                code = self._wait(agent)
                self.faults.append(Fault(kind, round(time.monotonic() - began_s, 2), step, code))
                print(f"drill: {len(self.faults)} of {kills}: {kind} after {after_s:.1f} s, step {step}", flush=True)
                if code == Exit.FINISHED:  # it was through already
                    return
                continue
            if code != Exit.FINISHED:
                raise NotTheSameError(f"{name} ended by itself with {code}: {_cause(self._folder / name)}")
            return

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        self._starts += 1
        command = [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", str(self._nproc),
                   "--run-id", name, "--runs-dir", str(self._folder), "--", "run", *self._flags, *_FLAGS]  # fmt: skip
        with (self._folder / f"{name}.out").open("ab") as output:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603

    def _wait(self, agent: subprocess.Popen[bytes]) -> int:
        """Its status, once nobody holds its run folder any more."""
        try:
            code = agent.wait()
        except BaseException:
            agent.terminate()
            agent.wait()
            raise
        deadline_s = time.monotonic() + _END_S
        while any(_is_held(lock) for lock in self._folder.glob("*/.*lock")):
            if time.monotonic() > deadline_s:
                raise NotTheSameError(f"something is left of a start that ended {_END_S:g} s ago")
            time.sleep(0.05)
        return code


# What befalls a run.


def _kill_rank(agent: subprocess.Popen[bytes], run: Path, dice: random.Random) -> None:
    ranks = list(_ranks(agent))
    if ranks:
        _kill(dice.choice(ranks))
    else:
        agent.kill()


def _kill_agent(agent: subprocess.Popen[bytes], run: Path, dice: random.Random) -> None:
    agent.kill()


def _kill_all(agent: subprocess.Popen[bytes], run: Path, dice: random.Random) -> None:
    for pid in [*_ranks(agent), agent.pid]:
        _kill(pid)


def _terminate(agent: subprocess.Popen[bytes], run: Path, dice: random.Random) -> None:
    agent.terminate()


def _damage(agent: subprocess.Popen[bytes], run: Path, dice: random.Random) -> None:
    """Power fails, and the disk has lied about the newest checkpoint; the one before is good."""
    _kill_all(agent, run, dice)
    agent.wait()
    whole = sorted(run.glob("checkpoints/step-*"))
    if len(whole) < 2:
        return
    file, manifest = whole[-1] / "state.pt", whole[-1] / "manifest.json"
    match dice.choice(["bit", "short", "manifest"]):
        case "bit":
            with file.open("r+b") as content:
                content.seek(dice.randrange(file.stat().st_size))
                byte = content.read(1)
                content.seek(-1, os.SEEK_CUR)
                content.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))
        case "short":
            os.truncate(file, dice.randrange(file.stat().st_size))
        case _:
            manifest.unlink()


_FAULTS = {
    "kill -9 of a rank": _kill_rank,
    "kill -9 of the agent": _kill_agent,
    "kill -9 of all": _kill_all,
    "SIGTERM": _terminate,
    "kill -9 of all, newest checkpoint damaged": _damage,
}


def _ranks(agent: subprocess.Popen[bytes]) -> Iterator[int]:
    for child in _children(agent.pid):
        try:
            if STATUS_PAGE in child.environ():
                yield child.pid
        except psutil.Error:
            continue


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# What must be the same.


def compare(one: Path, other: Path, ranks: int) -> None:
    """Final state, rows and samples of two runs. Raises NotTheSameError."""
    if weights_hash(one) != weights_hash(other):
        raise NotTheSameError(f"the final checkpoints of {one.name} and {other.name} differ")
    if _rows(one) != _rows(other):
        raise NotTheSameError(f"the rows of metrics.jsonl of {one.name} and {other.name} differ")
    for rank in range(ranks):
        if _samples(one, rank) != _samples(other, rank):
            raise NotTheSameError(f"rank {rank} did not see the same samples in {one.name} and {other.name}")
    count_samples(other, ranks)


def count_samples(run: Path, ranks: int) -> tuple[int, int]:
    """(samples, whole epochs) that a run has seen; each sample of an epoch once. Raises NotTheSameError."""
    from train.options import read_config

    config = read_config(["--config", str(run / "config.yaml")])
    seen: dict[int, list[int]] = {}
    for rank in range(ranks):
        for step, ids in _samples(run, rank):
            seen.setdefault(step, []).extend(ids)
    total = json.loads((run / "environment.json").read_text())["training_samples"]
    per_epoch = total // config.batch.global_size if config.data.drop_last else -(-total // config.batch.global_size)
    if sorted(seen) != list(range(1, len(seen) + 1)):
        raise NotTheSameError(f"{run.name}: steps are missing among the samples' rows")
    epochs = len(seen) // per_epoch
    for epoch in range(-(-len(seen) // per_epoch)):
        steps = range(epoch * per_epoch + 1, min((epoch + 1) * per_epoch, len(seen)) + 1)
        counts = Counter(sample for step in steps for sample in seen[step])
        if max(counts.values()) > 1:
            raise NotTheSameError(f"{run.name}: sample {counts.most_common(1)[0][0]} came twice in epoch {epoch}")
        if epoch < epochs and not config.data.drop_last and len(counts) != total:
            raise NotTheSameError(f"{run.name}: epoch {epoch} had {len(counts)} of {total} samples")
    return sum(map(len, seen.values())), epochs


def weights_hash(run: Path) -> str:
    """SHA-256 of all that the newest checkpoint holds of weights, optimizer and scaler. Raises NotTheSameError."""
    from train.checkpoint import Checkpoints
    from train.fingerprint import hash_of

    newest = Checkpoints(run / "checkpoints", keep=1).newest()
    if newest is None:
        raise NotTheSameError(f"{run.name} has no checkpoint")
    return hash_of({name: newest[0][name] for name in ("model", "optimizer", "scaler", "progress")})


def _samples(run: Path, rank: int) -> list[tuple[int, list[int]]]:
    lines = (run / "samples" / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["step"], row["ids"]) for row in map(json.loads, lines)]


def _rows(run: Path) -> list[dict[str, Any]]:
    """Without what must differ: the times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    timed = ("time_s", "items_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


def _newest_step(run: Path) -> int:
    try:
        return int(json.loads((run / "samples" / "rank0.jsonl").read_text().splitlines()[-2])["step"])
    except (OSError, ValueError, IndexError):
        return 0


def _cause(run: Path) -> str | None:
    try:
        return str(json.loads((run / "verdict.json").read_text())["cause"])
    except (OSError, ValueError, KeyError):
        return None


def _in_words(certificate: dict[str, Any]) -> str:
    kinds = Counter(fault["kind"] for fault in certificate["faults"])
    faults = "\n".join(f"  {count} x {kind}" for kind, count in kinds.most_common())
    epochs = f", {certificate['epochs']} whole epochs" if certificate["epochs"] else ""
    return (
        f"drill: PROVEN with seed {certificate['seed']} on {certificate['ranks']} ranks: {len(certificate['faults'])} "
        f"faults in {certificate['starts'] - 1} starts\n{faults}\n"
        f"  weights, optimizer, rows: the same to the last bit, sha256 {certificate['weights_sha256'][:16]}\n"
        f"  samples: {certificate['samples']:,}{epochs}, the same on each rank at each step, none twice in an epoch"
    )
