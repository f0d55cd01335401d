"""What rank 0 says at the end: a small table, and for a gpt on text what it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from train.data.text import trigram_loss
from train.models import GPT
from train.progress import console, log
from train.report.command import make_report
from train.state import Job


def tell(job: Job, folder: Path, *, finished: bool) -> None:
    """The table, and for a gpt on text what it writes."""
    progress = job.progress
    if not finished:
        is_saved = progress.saved_step == progress.step
        how = "saved" if is_saved else "but what came after the last checkpoint could not be saved"
        log.info(f"stopped on request after step {progress.step} of {job.steps}, {how}: the same command goes on")
        return
    table = Table(show_header=False, title=f"finished: {progress.step} steps", title_justify="left")
    for name, value in _results(job, folder):
        table.add_row(name, value)
    console.print(table)
    model, text = job.objective.model, job.data.text
    if isinstance(model, GPT) and text is not None and job.config.train.sample_tokens:
        model.eval()
        job.runtime.reseed(job.config.train.seed, 0)
        prompt = torch.tensor(text.val[:64].astype("int64"), device=job.runtime.device)
        written = model.generate(prompt, job.config.train.sample_tokens)[len(prompt) :]
        sample = bytes(written.tolist()).decode("utf-8", errors="replace")
        (folder / "sample.txt").write_text(sample, encoding="utf-8")
        console.print("what it writes (sample.txt):", style="bold")
        console.print(sample, markup=False)


def report(folder: Path) -> None:
    """The run as a page. Whatever goes wrong there is no matter of the run."""
    try:
        make_report(folder)
    except Exception as error:
        log.warning(f"no report could be made ({type(error).__name__}: {error}): python -m train report {folder}")


def _results(job: Job, folder: Path) -> list[tuple[str, str]]:
    progress, spec = job.progress, job.data.spec
    rows: list[tuple[str, str]] = []
    summary: dict[str, Any] = {"steps": progress.step}
    if progress.evaluation is not None:
        loss, accuracy = progress.evaluation.loss, progress.evaluation.accuracy
        summary["eval_loss"] = loss
        unit = f" nats/{spec.item[:-1]}" if spec.kind == "tokens" else ""
        rows.append(("validation loss", f"{loss:.4f}{unit}"))
        if spec.item == "bytes":
            rows.append(("bits per byte", f"{loss / math.log(2):.4f}"))
        if accuracy is not None:
            summary["eval_accuracy"] = accuracy
            rows.append(("validation accuracy", f"{accuracy:.2%}"))
    if job.data.text is not None:
        summary["trigram_loss"] = trigram_loss(job.data.text.train, job.data.text.val)
        rows.append(("a trigram count model", f"{summary['trigram_loss']:.4f} nats/byte"))
    if progress.seconds:
        summary["items_per_s"] = progress.items / progress.seconds
        rows.append(("throughput", f"{summary['items_per_s']:,.0f} {spec.item}/s"))
    if progress.updates < progress.step:
        skipped = progress.step - progress.updates
        rows.append(("updates skipped", f"{skipped} of {progress.step}: gradients were infinite in fp16"))
    rows.append(("training took", f"{progress.seconds:.1f} s"))
    rows.append(("run folder", str(folder)))
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return rows
