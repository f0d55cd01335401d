"""What `fab launch` says beside the verdict: refusals by its own options, how it ended on each host, how to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.launch import ending

_OPTIONS = (
    "config", "overrides", "nodes", "run_id", "time_limit", "grace", "join_timeout", "idle_timeout", "max_restarts",
    "runtime", "device", "code", "quarantine",
)  # fmt: skip


def outcomes(
    names: Sequence[str], hosts: Mapping[str, Mapping[str, Any]], watched: Mapping[str, tuple[str, str]]
) -> str:
    """A table of what became of each host."""
    rows = []
    for name in names:
        told = hosts[name]
        if told.get("failed"):
            row = f"was not started: {told.get('msg')}"
        elif told.get("lost"):
            row = f"cannot be reached: {watched.get(name, ('', ''))[1] or told.get('unreachable_why', '')}"
        elif told.get("exit_code") is None:
            row = "its agent was killed"
        else:
            row = f"exit code {told['exit_code']}: {ending.WORDS.get(told['exit_code'], 'killed')}"
        rows.append(f"  {name.ljust(max(map(len, names)))}  {row}")
    return "\n".join(["muster: how it ended on each host:", *rows])


def refused(say: Callable[[str], None], problems: Sequence[str], code: int) -> int:
    """Say why nothing was started; the exit code."""
    say(ending.refusal(problems, code))
    return int(code)


def goes_on(told: Mapping[str, Any]) -> str:
    """Where a detached launch is to be found."""
    launch_id = told["id"]
    return (
        f"muster: launch {launch_id} goes on by itself on {', '.join(told['names'])}. See it: fab status · "
        f"fab logs --follow --launch {launch_id} · stop it: fab stop --launch {launch_id} · its results: "
        f"fab collect --launch {launch_id}   (each with the same --hosts or --inventory)"
    )


def option(problem: str) -> str:
    """A problem that is told by a variable's name, told by that of an option."""
    name, colon, rest = problem.partition(":")
    return f"--{name.replace('_', '-')}{colon}{rest}" if name in _OPTIONS else problem
