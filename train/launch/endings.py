"""How a job ends, once all that agent 0 heard is there: which failure was the cause, or how it stopped. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from train.launch.hangs import who_hangs
from train.launch.verdict import Failure, Kind, Verdict, cause_of
from train.launch.views import NodeView, RankView
from train.seam import Exit

WINDOW_S = 1.0
"""After the first failure, so long for a better cause to be heard of."""
STOP_SIGNALS = (1, 2, 10, 12, 15)
"""What a script that knows nothing of stopping in good order dies of when it is asked to stop."""
AFTER_A_LOSS = "look at that host and at the network between, then start the job again"
_NAMED = 8


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The cause. What came later than a window after the first failure counts only if that window saw victims alone."""
    first_s = min(failure.at_s for failure in failures)
    early = [failure for failure in failures if failure.at_s <= first_s + WINDOW_S]
    return _for_all(cause_of(failures if all_victims(early) else early), failures)


def _for_all(cause: Failure, failures: Sequence[Failure]) -> Failure:
    """Where several ranks refused for one reason, a bad config most often, none of them is singled out."""
    ranks = sorted({one.rank for one in failures if one.refusal == cause.refusal and one.rank is not None})
    if cause.refusal is None or len(ranks) < 2:
        return cause
    is_row = len(ranks) == ranks[-1] - ranks[0] + 1 and len(ranks) > 2
    which = f"{ranks[0]}-{ranks[-1]}" if is_row else ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED and not is_row else ""
    words = f"ranks {which}{more} refused to start: {cause.refusal}"
    return replace(cause, words=words, host=None, node_rank=None, rank=None)


def all_victims(failures: Iterable[Failure]) -> bool:
    """Whether all of them followed from something that is not among them."""
    return all(failure.kind is Kind.VICTIM for failure in failures)


def died_of_stop(views: Iterable[RankView], failures: Sequence[Failure], asked_s: float) -> bool:
    """Whether ranks failed only because others ended at once when they were asked to stop."""
    died = any(-(view.code or 0) in STOP_SIGNALS for view in views)
    return died and all_victims(failures) and failures[0].at_s >= asked_s


def left_early(nodes: Sequence[NodeView], names: Sequence[str], failures: Sequence[Failure]) -> Failure | None:
    """The rank that had come to its end, well as it thought, when others lost contact: an uneven loader, a `return`."""
    if not all_victims(failures):
        return None
    first_s = min(failure.at_s for failure in failures)
    for index, node in enumerate(nodes):
        for rank, view in node.ranks.items():
            if view.code == 0 and view.ended_s < first_s:
                who = f"rank {rank} ({names[index]})"
                words = f"{who} came to its end, with status 0, while others still trained: {failures[0].words}"
                advice = "all ranks must take the same number of steps: is their data of the same length?"
                return Failure(
                    Kind.EXCEPTION, first_s, words, Exit.RANK_FAILED, names[index], index, rank, advice=advice
                )
    return None


def where_it_goes_on(views: Iterable[RankView]) -> str:
    """From where a job that is started once more goes on."""
    saved = max((view.saved_step for view in views), default=-1)
    return f"from the checkpoint of step {saved}" if saved >= 0 else "with no checkpoint known of this start"


def is_port_taken(cause: Failure, port: int) -> bool:
    """Whether rank 0 found the port of this start in use: somebody was quicker."""
    said = "\n".join([cause.words, *cause.evidence]).lower()
    return cause.rank == 0 and not cause.step and str(port) in said and ("in use" in said or "eaddrinuse" in said)


def nobody_came(
    names: Sequence[str], missing: Sequence[int], now_s: float, timeout_s: float, strangers: Sequence[str] = ()
) -> Failure:
    """Hosts that were waited for in vain; `strangers`: addresses that called with another secret."""
    called = f"; with another secret called: {', '.join(strangers[:_NAMED])}" if strangers else ""
    here = [name for index, name in enumerate(names) if index not in missing]
    who = ", ".join(f"{names[index]} (node rank {index})" for index in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return Failure(
        Kind.NEVER_JOINED,
        now_s,
        f"host {who}{more} of {len(names)} never came within {timeout_s:g} s; "
        f"here: {', '.join(here[:_NAMED])}{' …' if len(here) > _NAMED else ''}{called}",
        Exit.NEVER_JOINED,
        names[missing[0]],
        missing[0],
        advice="is the host up, did its agent start, does it reach this host's control port, has it the same "
        "secret? Or allow more time with --join-timeout-s",
    )


def host_lost(name: str, node_rank: int, ranks: Sequence[int], step: int | None, why: str, at_s: float) -> Failure:
    """A host is gone with its ranks."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    when = f" at step {step}" if step else ""
    words = f"host {name} (node rank {node_rank}, {which}) was lost{when}: {why}"
    return Failure(Kind.HOST_LOST, at_s, words, Exit.HOST_LOST, name, node_rank, step=step, advice=AFTER_A_LOSS)


def hang(
    nodes: Sequence[NodeView], names: Mapping[int, str], hosts: Mapping[int, int], now_s: float, why: str
) -> Failure:
    """A hang, judged by the evidence of all hosts.

    Args:
        nodes: what is known of each.
        names: by rank: its host's name.
        hosts: by rank: its node rank.
        now_s: agent 0's clock.
        why: what showed that somebody hangs.
    """
    evidence = {rank: told for node in nodes for rank, told in (node.evidence or {}).items()}
    for node in nodes:
        for rank, view in node.ranks.items():
            evidence.setdefault(rank, {})["code"] = view.code
    blamed, words, lines = who_hangs(evidence, names)
    state = None if blamed is None else evidence[blamed].get("state")
    return Failure(
        Kind.HANG,
        now_s,
        f"hang: {words} ({why})",
        Exit.HANG,
        None if blamed is None else names[blamed],
        None if blamed is None else hosts[blamed],
        blamed,
        max((view.step for node in nodes for view in node.ranks.values()), default=0),
        lines,
        f"the stacks of all ranks are in the run folder's evidence/; {_what_to_do(nodes, state)}",
    )


def _what_to_do(nodes: Sequence[NodeView], state: str | None) -> str:
    """About a hang; `state`: of the process that is to blame, where one is."""
    if state in ("T", "t"):
        return "if nobody meant to stop it, look for a debugger or a scheduler that suspends jobs on that host"
    is_ours = any(view.is_ours for node in nodes for view in node.ranks.values())
    more = "--runtime.step_timeout_s (or --idle-timeout-s)" if is_ours else "--idle-timeout-s"
    return f"if the work was only slow, allow more time with {more}"


def how_it_stopped(
    views: Sequence[RankView], stop_by: str | None, start_id: str, nobody: str = "a request to its ranks"
) -> Verdict:
    """No failure: finished, or stopped on request, saved or not.

    Args:
        views: of all ranks.
        stop_by: who asked to stop; None: nobody did.
        start_id: the start's.
        nobody: who it was where no agent was asked.
    """
    codes = {view.code for view in views}
    step = max((view.step for view in views), default=0)
    asked = f"stopped by {stop_by or nobody}"
    asked += f" at step {step}" if step else ""
    if codes == {0} and (stop_by is None or any(view.is_ours for view in views)):
        return Verdict("finished", Exit.FINISHED, None, step=step or None, start_id=start_id)
    if codes <= {Exit.FINISHED, Exit.STOPPED_SAVED}:
        words = f"{asked}, saved: the same command goes on from there"
        return Verdict("stopped", Exit.STOPPED_SAVED, words, step=step or None, start_id=start_id)
    words = f"{asked} with nothing saved: the script ends at once on SIGTERM"
    return Verdict("stopped", Exit.STOPPED_UNSAVED, words, step=step or None, start_id=start_id)


def stopped_early(by: str) -> Verdict:
    """Asked to stop while the agents still met."""
    return Verdict("stopped", Exit.STOPPED_UNSAVED, f"stopped by {by} before it began")
