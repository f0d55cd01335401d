"""Links of a lab's hosts with a rate: what leaves a host is held back there, what comes to it at the switch."""

from __future__ import annotations

import subprocess

from tests.hosts import Host

ETHERNET, IP_AND_TCP, MTU = 14, 20 + 20 + 12, 1500
"""Bytes of headers: TCP with its time stamps. The shaper counts the Ethernet header too."""


def goodput(bits_a_second: float) -> float:
    """Bytes a second that a program sees of a link's rate, at the very best."""
    return bits_a_second / 8 * (MTU - IP_AND_TCP) / (MTU + ETHERNET)


def shape(host: Host, rate: str, *, out: bool = True, into: bool = True) -> None:
    """Give its link a rate, as `1gbit`, in one direction or both. The bucket takes in a few of the largest bursts."""
    bucket = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    if out:
        host.run(" ".join(["tc", "qdisc", "replace", "dev", "eth0", *bucket]))
    if into:
        at_switch = ["nsenter", "-t", str(host._switch), "-n", "tc", "qdisc", "replace", "dev", f"port{host.index}"]
        subprocess.run([*at_switch, *bucket], check=True)
