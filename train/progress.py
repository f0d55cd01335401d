"""What one sees while it trains: a progress line on a terminal, plain lines elsewhere, a log a rank."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from train.seam import LOG_ONLY

PLAIN_EVERY_S = 5.0
log = logging.getLogger("train")
console = Console(highlight=False, soft_wrap=True)
errors = Console(highlight=False, soft_wrap=True, stderr=True)


def log_to_console(rank: int, world_size: int, *, has_agent: bool = False) -> None:
    """Rank 0 says everything, the others only what is wrong, with their name before it.

    A node agent names the rank itself, and keeps its log: of the other ranks it gets all, and what is for the log
    alone is marked so.
    """
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    handler = _ConsoleHandler(hides_info=has_agent and rank != 0)
    handler.setLevel(logging.INFO if rank == 0 or has_agent else logging.WARNING)
    prefix = f"rank {rank}: " if world_size > 1 and rank != 0 and not has_agent else ""
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    log.addHandler(handler)


def log_to_file(folder: Path, node_rank: int, host: str, rank: int) -> None:
    """Also to `logs/node<i>-<host>/rank<r>.log`, each line with time, host and rank."""
    path = folder / "logs" / f"node{node_rank}-{host}" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s {host} rank {rank} %(levelname)s %(message)s"))
    log.addHandler(handler)


class _ConsoleHandler(logging.Handler):
    def __init__(self, *, hides_info: bool) -> None:
        super().__init__()
        self._hides_info = hides_info

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if self._hides_info and record.levelno < logging.WARNING:
            text = "\n".join(f"{LOG_ONLY}{line}" for line in text.split("\n"))
        style = {logging.WARNING: "yellow", logging.ERROR: "bold red"}.get(record.levelno)
        where = errors if record.levelno >= logging.ERROR else console
        where.print(text, style=style, markup=False, emoji=False)  # `own:key: …` is no emoji


class StepLine:
    """Step, loss, learning rate, speed and time left, on rank 0."""

    def __init__(self, steps: int, item: str, *, shown: bool) -> None:
        """
        Args:
            steps: steps in all.
            item: what speed is counted in.
            shown: False on ranks that stay silent.
        """
        self._steps = steps
        self._item = item
        self._shown = shown
        self._last_shown = -PLAIN_EVERY_S
        self._bar: Progress | None = None

    def start(self, first: int) -> None:
        """Begin to count time; `first` steps are done already."""
        self._first = first
        self._started = time.monotonic()
        if self._shown and console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._steps, completed=first)
            self._bar.start()

    def update(self, step: int, loss: float, lr: float, items_per_s: float) -> None:
        """Show the newest numbers, a few times a second on a terminal, every few seconds elsewhere."""
        now = time.monotonic()
        wait_s = 0.2 if self._bar is not None else PLAIN_EVERY_S
        if not self._shown or (now - self._last_shown < wait_s and step != self._steps):
            return
        self._last_shown = now
        words = f"loss {loss:.4f}  lr {lr:.1e}  {items_per_s:,.0f} {self._item}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=words)
        else:
            log.info(f"step {step}/{self._steps}  {words}  {self._left(step)} left")

    def _left(self, step: int) -> str:
        done = max(1, step - self._first)
        seconds = int((time.monotonic() - self._started) / done * (self._steps - step))
        return (
            f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            if seconds >= 3600
            else f"{seconds // 60}:{seconds % 60:02}"
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
