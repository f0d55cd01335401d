"""`python -m train drill`: a run that is killed again and again must end with the bits of one that was left alone."""

from __future__ import annotations

import argparse
import contextlib
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

from train.checks.befall import ANSWERS, KINDS, Agent, StillThereError, befall, end_all, until_free
from train.checks.same import NotTheSameError, cause_of, compare, count_samples, newest_step, weights_hash
from train.errors import UsageError
from train.seam import RUN_ID, RUNS_DIR, Exit

_EPILOG = """examples:
  python -m train drill --config ddp --kills 5 --train.steps 200
  python -m train drill --config ddp --kills 20 --seed 7 --nproc-per-node 4 --train.steps 400 --train.save_every 25

Faults come at random times, in start-up, training or saving, drawn from --seed: kill -9 of one rank, of the agent, or
of all processes at once; SIGTERM; a newest checkpoint with a flipped bit, cut short, or without its manifest.
Where a run ends before all faults were dealt, another is begun. Exit code: 0 proven, 1 not the same (a bug), 2 usage,
5 the run itself fails. A fault counts that hit the run at work, and must be answered with its exit code."""
_ENDS_S = 240.0
"""So long a start may take at least, whatever the run needs: a fault is noticed and answered within it."""
_MOST_IN_VAIN = 10
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


def main(argv: Sequence[str]) -> int:
    """Run the drill, print the certificate and leave it as `drill.json`; an exit code."""
    options, rest = _parse(argv)
    folder = Path(options.runs_dir) / f"drill-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a drill that is ended leaves no run behind
    try:
        _refuse_bad_config(rest, options.nproc_per_node)
        _make(folder)
        print(f"drill: run folders in {folder}", flush=True)
        dice = random.Random(options.seed)  # noqa: S311 - not for secrets
        drill = Drill(folder, options.nproc_per_node, rest, dice, options.limit_s)
        certificate = {"seed": options.seed, **drill.run(options.kills)}
        if "failed" not in certificate:
            (folder / "drill.json").write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
    except UsageError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return Exit.USAGE
    except OSError as error:
        print(f"drill: nothing is proven: {error}", file=sys.stderr)
        return Exit.RANK_FAILED
    except (NotTheSameError, StillThereError) as error:
        print(
            f"drill: NOT the same: {error}\ndrill: the runs are kept in {folder}: please report this", file=sys.stderr
        )
        return Exit.BUG
    except KeyboardInterrupt:
        return Exit.STOPPED_UNSAVED
    finally:
        signal.signal(signal.SIGTERM, before)
    if "failed" in certificate:
        print(f"drill: the run fails by itself: {certificate['failed']}", file=sys.stderr)
        return Exit.RANK_FAILED
    print(_in_words(certificate))
    return Exit.FINISHED


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--runs-dir: cannot make {folder}: {error}") from None


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
    parser.add_argument("--limit-s", type=float, default=3600.0, metavar="S", help="a longer start hangs (3600)")
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

    def __init__(self, folder: Path, nproc: int, flags: Sequence[str], dice: random.Random, limit_s: float) -> None:
        """
        Args:
            folder: for the run folders.
            nproc: ranks.
            flags: of `python -m train run`.
            dice: decides on faults and moments.
            limit_s: how long a start may take.
        """
        self._folder, self._nproc, self._flags, self._dice = folder, nproc, flags, dice
        self._limit_s = limit_s
        self.faults: list[Fault] = []
        self._starts = 0

    def run(self, kills: int) -> dict[str, Any]:
        """The certificate's facts; with `failed` where the run fails untouched.

        Raises:
            NotTheSameError: the proof has failed.
            StillThereError: something of a start does not end.
            UsageError: the run is too short to be hit.
        """
        began_s = time.monotonic()
        with self._started("untouched") as agent:
            code = self._end(agent, "untouched")
        if code != Exit.FINISHED:
            return {"failed": cause_of(self._folder / "untouched") or f"exit status {code}"}
        untouched_s = time.monotonic() - began_s
        self._limit_s = min(self._limit_s, max(_ENDS_S, 5 * untouched_s))
        print(f"drill: untouched: {untouched_s:.0f} s", flush=True)
        rounds = in_vain = 0
        while len(self.faults) < kills:
            rounds += 1
            before = len(self.faults)
            self._disturb(f"disturbed-{rounds}", kills, untouched_s)
            compare(self._folder / "untouched", self._folder / f"disturbed-{rounds}", self._nproc)
            in_vain = in_vain + 1 if len(self.faults) == before else 0
            if in_vain == _MOST_IN_VAIN:
                raise UsageError(f"train.steps: {in_vain} runs were through before a fault hit them: make them longer")
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
        code = None
        while code != Exit.FINISHED:
            with self._started(name) as agent:
                if len(self.faults) == kills:
                    code = self._end(agent, name)
                else:
                    code = self._deal(agent, name, self._dice.uniform(0.0, 0.8 * untouched_s), kills)

    def _deal(self, agent: Agent, name: str, after_s: float, kills: int) -> int:
        """A fault after that time, if there is still something to hit; how the start has ended."""
        began_s, run = time.monotonic(), self._folder / name
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(after_s)
        kind, step = "", newest_step(run)
        if agent.poll() is None:
            kind = befall(self._dice.choice(KINDS), agent, run, self._dice)
        code = self._end(agent, name, is_hit=kind != "")
        if kind == "" or code == Exit.FINISHED:  # it came when all was over
            return code
        if code not in ANSWERS[kind]:
            raise NotTheSameError(f"{name} was dealt {kind} at step {step} and ended with {code}: {cause_of(run)}")
        self.faults.append(Fault(kind, round(time.monotonic() - began_s, 2), step, code))
        print(f"drill: {len(self.faults)} of {kills}: {kind} after {after_s:.1f} s, step {step}", flush=True)
        return code

    def _end(self, agent: Agent, name: str, *, is_hit: bool = False) -> int:
        """The agent's status, once nobody holds its run folder any more.

        Raises:
            NotTheSameError: it does not end, or a run that goes on has ended by itself and is not through.
        """
        try:
            code = agent.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            raise NotTheSameError(f"{name} did not end within {self._limit_s:.0f} s (--limit-s)") from None
        until_free(self._folder)
        if code != Exit.FINISHED and not is_hit and name != "untouched":
            raise NotTheSameError(f"{name} ended by itself with {code}: {cause_of(self._folder / name)}")
        return code

    @contextlib.contextmanager
    def _started(self, name: str) -> Iterator[Agent]:
        """An agent at work; nothing of it is left, whatever happens here."""
        self._starts += 1
        command = [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", str(self._nproc),
                   "--run-id", name, "--runs-dir", str(self._folder), "--", "run", *self._flags, *_FLAGS]  # fmt: skip
        with (self._folder / f"{name}.out").open("ab") as output:
            agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603
        try:
            yield agent
        finally:
            end_all(agent)
            agent.wait()


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
