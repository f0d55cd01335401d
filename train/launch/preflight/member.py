"""One host's part of a preflight, from beginning to end: what it tells of itself and of its calls."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from train.launch.preflight.asked import Asked
from train.launch.preflight.calls import Meeting
from train.launch.preflight.facts import facts_of, marked, unmark
from train.launch.preflight.reduction import Reduction
from train.launch.topology import Plan

MUNGE_S = 5.0


async def report_of(plan: Plan, node_rank: int, secret: bytes, asked: Asked) -> dict[str, Any]:
    """What this host has to tell, for `judge`."""
    began_s = time.monotonic()
    mark = hashlib.sha256(b"mark" + secret).hexdigest()[:12]
    reduction = Reduction(plan, node_rank, asked.device)
    if asked.reduces:
        await reduction.start()
    try:
        facts = await asyncio.to_thread(facts_of, asked, plan.hosts, node_rank, mark)
        meeting = Meeting(plan, node_rank, secret, asked.patience_s, facts["identity"])
        await meeting.open()
        report = {"node_rank": node_rank, "name": plan.hosts[node_rank].name, "facts": facts}
        report |= await _together(meeting, reduction, asked, mark)
    finally:
        await reduction.end()
        await asyncio.to_thread(unmark, asked, mark, node_rank)
    return {**report, "asked": asked.as_dict(), "took_s": round(time.monotonic() - began_s, 2)}


async def _together(meeting: Meeting, reduction: Reduction, asked: Asked, mark: str) -> dict[str, Any]:
    """What only shows between hosts."""
    slurm = _has_munge(os.environ)
    if slurm:
        meeting.check_credential = unmunged
    await meeting.call_all()
    everybody = await meeting.all_have_called()
    seen = await asyncio.to_thread(marked, asked, mark) if everybody else None
    await meeting.pour()
    if slurm:
        await meeting.show_credential(await asyncio.to_thread(_munged))
    told: dict[str, Any] | None = None
    if asked.reduces and everybody and meeting.is_complete and meeting.store_port is not None:
        told = await reduction.run(meeting.store_port)
    await meeting.part()
    return {
        "ports": meeting.ports, "taken": meeting.taken, "calls": meeting.as_list(), "seen": seen, "reduction": told,
        "munge": slurm,
    }  # fmt: skip


def _has_munge(env: Mapping[str, str]) -> bool:
    return bool(env.get("SLURM_JOB_ID")) and shutil.which("munge") is not None


def _munged() -> str:
    return _said(["munge", "--no-input"])[1]


def unmunged(credential: str) -> str:
    """What munge here says of a credential made elsewhere: `Success`, or why not."""
    if not credential.strip():
        return "munge there made none: is munged running?"
    ok, text = _said(["unmunge"], credential)
    status = [line for line in text.splitlines() if line.startswith(("STATUS", "unmunge:"))]
    return "Success" if ok else status[0].partition(":")[2].strip() if status else "no answer"


def _said(words: list[str], text: str = "") -> tuple[bool, str]:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=MUNGE_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False, ""
    return done.returncode == 0, done.stdout + done.stderr
