"""A preflight of hosts by SSH: each one by itself, and all between them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from train.errors import UsageError
from train.launch import request
from train.launch.preflight import afar, quarantine
from train.launch.ssh_code import push_code
from train.launch.ssh_host import SshHost, who
from train.launch.ssh_site import FAB, Site


def preflight(
    site: Site, runtime: str, device: str, floors: Sequence[str] = (), collected: str = "", without: str = ""
) -> tuple[str, int]:
    """Whether the hosts are fit, each one and together: words and an exit code. Raises UsageError.

    Args:
        site: the hosts.
        runtime: venv or docker.
        device: auto, cpu or cuda.
        floors: more options of `python -m train preflight`.
        collected: a quarantine, for hosts that are not fit.
        without: one whose hosts are left out.
    """
    chosen_hosts, _ = quarantine.left([*site.hosts], without)
    probes = site.ask("probed", chosen_hosts, runtime=runtime)
    lost = afar.lost_of(probes)
    names = [name for name in probes if name not in lost]
    chosen, problems = request.device_of(device, {name: probes[name].get("gpu_files", 0) for name in names}, FAB)
    if problems:
        raise UsageError(problems)
    variables = {name: {"slots": 1, **site.variables[name]} for name in names}
    arguments = afar.words_of(names, variables, chosen, floors) if names else {}
    if runtime == "venv":
        push_code(site, {name: probes[name] for name in names})
    launch_id, secret = request.new_id(), secrets.token_urlsafe(32)

    def inspect(name: str, host: SshHost) -> str:
        gpus = int(variables[name]["slots"]) if chosen == "cuda" else 0
        given = site.given(
            launch=launch_id, by=f"fab preflight, called by {who()}", runtime=runtime, wait_s=afar.WAIT_S,
            arguments=arguments[name], about={}, files={}, secret=secret, gpus=gpus, environment={}, mounts=[],
            options=[], code="",
        )  # fmt: skip
        return afar.said_of(host.ask("inspected", given, afar.WAIT_S + 15.0))

    said = site.each(inspect, names, max(1, len(names)))  # all at once: they wait for each other
    words = {name: each if isinstance(each, str) else each["msg"] for name, each in said.items()}
    told = afar.verdict(names, variables, words, lost, collected)
    return told.words, told.exit_code
