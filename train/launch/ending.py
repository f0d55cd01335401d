"""What a launcher says last: of all that hosts told it, the one line that holds, and its exit code in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from train.launch.remedies import ANSIBLE, Remedies
from train.seam import Exit

WORDS = {
    Exit.FINISHED: "finished",
    Exit.BUG: "a bug of Muster's",
    Exit.USAGE: "bad config or usage, nothing was trained",
    Exit.PREFLIGHT: "a host is not fit for the job",
    Exit.NEVER_JOINED: "a host or rank never joined",
    Exit.RANK_FAILED: "a rank failed",
    Exit.HANG: "hang",
    Exit.HOST_LOST: "a host was lost",
    Exit.STOPPED_UNSAVED: "stopped, unsaved",
    Exit.STOPPED_SAVED: "stopped and saved, run it again to go on",
}
_MARK = "muster: "
_TAIL = 20


def last_words(verdict: Mapping[str, Any], names: Sequence[str], brought: Mapping[str, Mapping[str, Any]]) -> str:
    """The last lines on a launcher's console.

    Args:
        verdict: as `verdict` found it.
        names: hosts in rank order; what the first one said was seen already.
        brought: for each host `dest`, the folder that holds its results now, or `msg`, why there is none.
    """
    lines = []
    if verdict["host"] != names[0] and verdict["tail"]:
        lines += [f"the last lines of {verdict['host']}:", *(f"  | {line}" for line in verdict["tail"][-_TAIL:])]
    lines += brought_words(brought) if any(brought.values()) else []
    return "\n".join([*lines, f"{_MARK}{words_with_code(verdict)}"])


def brought_words(brought: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What came of collecting results: for each host `dest`, the folder that holds them now, or `msg`, why not."""
    lines = [f"{_MARK}{name}: not all could be brought: {b['msg']}" for name, b in brought.items() if b.get("msg")]
    dest = next((b["dest"] for b in brought.values() if b.get("dest")), None)
    return [*lines, f"{_MARK}results are in {dest}" if dest else f"{_MARK}there are no results"]


def words_with_code(verdict: Mapping[str, Any]) -> str:
    """The verdict's words, and its exit code with what that means."""
    code = Exit(verdict["exit_code"])
    return f"{verdict['words']} (exit code {code}: {WORDS[code]})"


def refusal(problems: Sequence[str], code: int) -> str:
    """The last lines where nothing came of it."""
    return "\n".join([f"{_MARK}nothing was started (exit code {code}: {WORDS[Exit(code)]}):", *_indented(problems)])


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def verdict(
    names: Sequence[str], hosts: Mapping[str, Mapping[str, Any]], remedies: Remedies = ANSIBLE
) -> dict[str, Any]:
    """How a job ended: as agent 0 says, or else the lowest host that outlived it.

    Args:
        names: hosts in rank order.
        hosts: what each one told: `failed` and `msg` where its agent could not be started; `lost` where it cannot be
            reached; `exit_code` and `said`, its last lines, where its agent has ended.
        remedies: the launcher's.

    Returns:
        exit_code, words (the line without what introduces it), host (whose word it is), tail (what else that host said)
    """
    refused = {name: str(hosts[name].get("msg", "")) for name in names if hosts[name].get("failed")}
    if refused:
        words = "; ".join(f"{name}: {why}" for name, why in refused.items())
        in_use = all("in use" in why for why in refused.values())
        advice = f": wait, stop it by {remedies.stop}, or run beside it with {remedies.share}" if in_use else ""
        return _told(Exit.PREFLIGHT, f"nothing was trained: {words}{advice}", next(iter(refused)), [])
    for name in names:
        code, said = hosts[name].get("exit_code"), [*hosts[name].get("said", [])]
        if code in WORDS and said:
            own = [line for line in said if line.startswith(_MARK)]
            if code == Exit.USAGE:  # what is wrong stands above
                return _told(code, _usage(said) or own[-1].removeprefix(_MARK), name, said)
            if own:
                return _told(code, own[-1].removeprefix(_MARK), name, said)
    for name in names:  # it ended before it could judge
        code, last = hosts[name].get("exit_code"), hosts[name].get("last_words")
        if code in WORDS and last:
            return _told(code, f"{name}: {last}", name, [])
    lost = [name for name in names if hosts[name].get("lost")]
    killed = [name for name in names if name not in lost]
    words = " and ".join(
        f"{', '.join(which)} {how}"
        for which, how in ((lost, "cannot be reached"), (killed, "was killed before it could say why"))
        if which
    )
    last = next((str(hosts[name]["last_words"]) for name in killed if hosts[name].get("last_words")), "")
    return _told(Exit.HOST_LOST, f"{words}{': ' + last if last else ''}", names[0], [])


def _told(code: int, words: str, host: str, tail: Sequence[str]) -> dict[str, Any]:
    return {"exit_code": int(code), "words": words, "host": host, "tail": [*tail]}


def _usage(said: Sequence[str]) -> str:
    """The problems that an agent or its ranks named, as one line."""
    start = max((i for i, line in enumerate(said) if "nothing was started" in line), default=None)
    if start is None:
        return ""
    problems = [line.partition(" | ")[2] or line for line in said[start + 1 :] if not line.startswith(_MARK)]
    return "nothing was started: " + "; ".join(problem.strip() for problem in problems) if problems else ""
