"""Reports of all hosts → findings: what only shows between hosts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.launch.preflight.asked import Asked
from train.launch.preflight.calls import MOST_CALLED
from train.launch.preflight.findings import ERROR, OK, UNKNOWN, WARNING, Finding
from train.launch.topology import Plan

Report = Mapping[str, Any]
SLOW = 8.0
"""So much slower than the hosts' median is an error; the floor may also be given."""
FAR_MS = 100.0
"""Within a cluster it takes far less, on busy hosts too."""


def between(plan: Plan, reports: Sequence[Report], asked: Asked) -> list[Finding]:
    """All of it; nothing where there is one host only."""
    if len(plan.hosts) < 2 or not reports:
        return []
    calls = {(report["node_rank"], call["node_rank"]): call for report in reports for call in report["calls"]}
    names = [host.name for host in plan.hosts]
    findings = [*_twins(names, reports), *_ports(plan, reports, calls, names)]
    is_reached = not any(finding.level == ERROR for finding in findings)
    findings += [*_clocks(names, reports, calls, asked), *_way(calls, names), *_interfaces(reports)]
    findings += [*_rates(names, calls, asked), *_munge(reports, calls, names)]
    return [*findings, *_reduction(reports, asked, is_reached=is_reached)]


def _twins(names: Sequence[str], reports: Sequence[Report]) -> Iterator[Finding]:
    """Two hosts of the plan that are one."""
    by_identity: dict[str, list[str]] = {}
    for report in reports:
        by_identity.setdefault(report["facts"]["identity"], []).append(report["name"])
    for same in by_identity.values():
        if len(same) > 1:
            yield Finding(
                "addresses", ERROR, tuple(same), "they are one and the same machine",
                "give each host an address of its own in the inventory or host list",
            )  # fmt: skip


def _ports(
    plan: Plan, reports: Sequence[Report], calls: Mapping[tuple[int, int], Any], names: Sequence[str]
) -> Iterator[Finding]:
    told = {report["node_rank"] for report in reports}
    found = False
    for report in reports:
        if not report["ports"] or len(report["ports"]) < 2:
            found = True
            ports = " ".join(map(str, plan.master_ports))
            yield Finding(
                "ports", ERROR, (report["name"],), f"none of the plan's ports is free: {ports}",
                f"ss -ltnp | grep -E '{'|'.join(map(str, plan.master_ports[:3]))}'; or another --run-id",
            )  # fmt: skip
    for (caller, called), call in calls.items():
        if call["reached"] or called not in told:
            continue
        found = True
        host = plan.hosts[called]
        back = calls.get((called, caller))
        one_way = back is not None and back["reached"]
        seen = f"{names[caller]} does not reach {names[called]} at {host.address} port {call['port']}: {call['why']}"
        yield Finding(
            "ports", ERROR, (names[called],) if one_way else (names[called], names[caller]),
            seen + (f", though {names[called]} reaches {names[caller]}" if one_way else ""),
            _port_fix(call, host.address),
        )  # fmt: skip
    if not found:
        pairs = len(calls)
        part = f" ({MOST_CALLED} for each host: all pairs would be too many)" if len(names) > MOST_CALLED + 1 else ""
        yield Finding("ports", OK, (), f"open both ways, {pairs:,} pairs called{part}")


def _port_fix(call: Mapping[str, Any], address: str) -> str:
    if call["answered_by"] is not None and call["answered_by"] != call["node_rank"]:
        return f"getent hosts {address}   (it leads to another host: mend DNS, /etc/hosts or the inventory)"
    if call["why"] == "no answer":
        return (
            "iptables -S; nft list ruleset   (on it: let the cluster's network in; base_firewall_network for Ansible)"
        )
    return f"ping {address}; ss -ltn   (is it up, and does nothing reject the cluster's network?)"


def _clocks(
    names: Sequence[str], reports: Sequence[Report], calls: Mapping[tuple[int, int], Any], asked: Asked
) -> Iterator[Finding]:
    """Each host against the middle of all, as seen by each of the others."""
    ahead: dict[int, list[float]] = {}
    for (caller, called), call in calls.items():
        if call["ahead_s"] is not None:
            ahead.setdefault(called, []).append(call["ahead_s"])
            ahead.setdefault(caller, []).append(-call["ahead_s"])
    if not ahead:
        yield Finding("clocks", UNKNOWN, (), "no host reached another")
        return
    # The median over all others: with more than two hosts, one that is wrong does not make the others look it.
    apart = {rank: statistics.median(values) for rank, values in ahead.items()}
    most = max(abs(value) for value in apart.values())
    wrong = {rank: value for rank, value in apart.items() if abs(value) > asked.max_skew_s}
    if len(names) == 2 and wrong:
        fast = max(apart, key=lambda rank: apart[rank])
        words = f"{names[fast]} is {apart[fast]:.1f} s ahead of {names[1 - fast]}"
        yield Finding("clocks", ERROR, tuple(names), words, _CLOCK_FIX)
        return
    for rank, value in wrong.items():
        way = "ahead of" if value > 0 else "behind"
        yield Finding("clocks", ERROR, (names[rank],), f"{abs(value):.1f} s {way} the others", _CLOCK_FIX)
    if not wrong:
        yield Finding("clocks", OK, (), f"within {most * 1000:.0f} ms" if most >= 0.001 else "within 1 ms")


_CLOCK_FIX = "chronyc makestep; chronyc tracking   (provision.yml installs chrony)"


def _way(calls: Mapping[tuple[int, int], Any], names: Sequence[str]) -> Iterator[Finding]:
    times = {pair: call["round_trip_ms"] for pair, call in calls.items() if call["round_trip_ms"] is not None}
    if not times:
        return
    far = [pair for pair, ms in times.items() if ms > FAR_MS]
    middle = statistics.median(times.values())
    if not far:
        yield Finding("round trip", OK, (), f"{middle:.1f} ms, at most {max(times.values()):.1f} ms")
        return
    (caller, called), slowest = max(times.items(), key=lambda item: item[1])
    # Where all of a host's ways are long, it is the host.
    blamed = [name for rank, name in enumerate(names) if all(rank in pair for pair in far)]
    yield Finding(
        "round trip", WARNING, tuple(blamed[:1]),
        f"{slowest:.0f} ms from {names[caller]} to {names[called]}, {middle:.1f} ms for half of all pairs",
        f"ping -c 20 {names[called]}   (a busy host, a long way, or a bad link)",
    )  # fmt: skip


def _interfaces(reports: Sequence[Report]) -> Iterator[Finding]:
    """By which interfaces hosts reach each other, with what MTU and speed."""
    links = {
        (report["name"], link["interface"]): link for report in reports for link in report["facts"]["links"].values()
    }
    found = False
    for what, unit, check in (("mtu", "bytes", "MTU"), ("mbit_per_s", "Mbit/s", "link speed")):
        values = {
            key: link[what] for key, link in links.items() if link[what] is not None and link["interface"] != "lo"
        }
        if len(set(values.values())) > 1:
            found = True
            usual = statistics.mode(values.values())
            for (name, interface), value in values.items():
                if value != usual:
                    fix = f"ip link set {interface} mtu {usual}" if what == "mtu" else f"ethtool {interface}"
                    yield Finding(check, WARNING, (name,), f"{interface}: {value} {unit}, elsewhere {usual}", fix)
    unknown = sorted({name for name, interface in links if interface is None})
    if unknown:
        yield Finding("interface", UNKNOWN, tuple(unknown), "which interface leads to the others")
    if not found:
        used = sorted({f"{interface} (MTU {link['mtu']})" for (_, interface), link in links.items() if interface})
        yield Finding("interface", OK, (), ", ".join(used[:6]))


def _rates(names: Sequence[str], calls: Mapping[tuple[int, int], Any], asked: Asked) -> Iterator[Finding]:
    rates = {pair: call["mb_per_s"] for pair, call in calls.items() if call["mb_per_s"] is not None}
    if not rates:
        yield Finding("speed", UNKNOWN, (), "no host reached the next one")
        return
    middle = statistics.median(rates.values())
    floor = middle / SLOW if asked.min_mb_per_s is None else asked.min_mb_per_s
    slow = {pair for pair, rate in rates.items() if rate < floor}
    words = f"{middle:,.0f} MB/s for half of all pairs, at least {min(rates.values()):,.0f}"
    if not slow:
        yield Finding("speed", OK, (), words)
        return
    told = f"against {middle:,.0f} for half of all pairs" if asked.min_mb_per_s is None else f"; {floor:g} are needed"
    blamed: set[int] = set()
    for way, side in (("sends", 0), ("receives", 1)):
        for rank in sorted({pair[side] for pair in slow}):
            own = [pair for pair in rates if pair[side] == rank]
            if len(own) > 1 and set(own) <= slow:
                blamed.add(rank)
                best = max(rates[pair] for pair in own)
                yield Finding("speed", ERROR, (names[rank],), f"it {way} {best:,.1f} MB/s {told}", _SPEED_FIX)
    for caller, called in sorted(slow):
        if not {caller, called} & blamed:
            seen = f"from {names[caller]} to {names[called]} {rates[caller, called]:,.1f} MB/s {told}"
            yield Finding("speed", ERROR, (names[caller], names[called]), seen, _SPEED_FIX)


_SPEED_FIX = "ethtool <interface>; tc qdisc show; ip -s link   (speed, shaping, errors of the interface)"


def _munge(reports: Sequence[Report], calls: Mapping[tuple[int, int], Any], names: Sequence[str]) -> Iterator[Finding]:
    if not any(report["munge"] for report in reports):
        return
    refused = {pair: call["credential"] for pair, call in calls.items() if call["credential"] not in (None, "Success")}
    if not refused:
        yield Finding("munge", OK, (), "each host's credentials are good on another")
        return
    # A host with another key is refused by the next one, and refuses the one before it.
    by_host = [rank for rank in range(len(names)) if sum(rank in pair for pair in refused) > 1] or [
        rank for pair in refused for rank in pair
    ]
    yield Finding(
        "munge", ERROR, tuple(names[rank] for rank in dict.fromkeys(by_host)), next(iter(refused.values())),
        "copy /etc/munge/munge.key from a host that is well (owner munge, mode 0400), and systemctl restart munge",
    )  # fmt: skip


def _reduction(reports: Sequence[Report], asked: Asked, *, is_reached: bool) -> Iterator[Finding]:
    if not asked.reduces:
        return
    told = {report["name"]: report["reduction"] for report in reports if report["reduction"]}
    failed = {name: str(one["problem"]) for name, one in told.items() if one.get("problem")}
    wrong = [name for name, one in told.items() if one.get("wrong")]
    if wrong:
        yield Finding(
            "all-reduce", ERROR, tuple(wrong), f"{told[wrong[0]]['wrong']:,} sums are not what they must be",
            "try again with fewer hosts until one is left over: memory, GPU or network of that one corrupts data",
        )  # fmt: skip
    elif not is_reached or not told:
        yield Finding("all-reduce", UNKNOWN, (), "not tried: not all hosts reach each other")
    elif failed:
        name, why = next(iter(failed.items()))
        yield Finding(
            "all-reduce",
            ERROR,
            (),
            f"it did not come about ({name}: {why})",
            "python -m train explain <its log>; run it again",
        )
    else:
        rates = [one["mb_per_s"] for one in told.values()]
        yield Finding("all-reduce", OK, (), f"sums are right; {statistics.median(rates):,.0f} MB/s bus bandwidth")
