"""Whether hosts are fit for a job, by what each one told of itself: every reason against it, each with its host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from train.launch.remedies import ANSIBLE, Remedies

_DIGEST_LETTERS = 19


def unfit(
    probes: Mapping[str, Mapping[str, Any]], request: Mapping[str, Any], device: str, remedies: Remedies = ANSIBLE
) -> list[str]:
    """Why these hosts cannot do the job: every reason, each with its host."""
    problems = []
    for name, probe in probes.items():
        if probe.get("unreachable_why"):
            problems.append(f"{name} cannot be reached: {probe['unreachable_why']}")
            continue
        problems += [f"{name}: {problem}" for problem in probe.get("problems", [])]
        slots = request["hosts"][name]["slots"]
        if device == "cuda" and probe.get("gpus", 0) < slots:
            found = f"nvidia-smi lists {probe.get('gpus', 0)}, of device files there are {probe.get('gpu_files', 0)}"
            problems.append(
                f"{name}: {slots} GPUs are asked for (slots), but {found}: check driver and container toolkit "
                f"({remedies.set_up}), or say {remedies.on_cpu}"
            )
        if not request["share"]:
            problems += [
                f"{name}: it is in use by {words_of(launch)}: wait, or {remedies.stop}, or {remedies.share}"
                for launch in probe.get("launches", [])
            ]
    images = {str(probe["image"]): name for name, probe in reversed([*probes.items()]) if probe.get("image")}
    if len(images) > 1:
        told = ", ".join(f"{name} has {image[:_DIGEST_LETTERS]}" for image, name in images.items())
        problems.append(f"the image is not the same everywhere ({told}): {remedies.set_up}")
    return problems


def words_of(launch: Mapping[str, Any]) -> str:
    """A launch for people."""
    what = f"run {launch['run_id']}" if launch.get("run_id") else " ".join(launch.get("command") or ["a job"])
    since = time.strftime("%F %T", time.localtime(launch["since"]))
    return f"launch {launch['id']} of {launch['by']} since {since} ({what})"
