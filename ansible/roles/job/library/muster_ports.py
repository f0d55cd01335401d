#!/usr/bin/python
"""An Ansible module: listens for a while on ports of a host, and tries those of others. See muster_ports.yml."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

TRY_S = 5.0


def listen(given: dict[str, Any]) -> dict[str, Any]:
    """Listen on the first free one of the ports, and on one that the system gives; a process apart, for a while."""
    sockets, taken = [], []
    for port in given["ports"]:
        try:
            sockets.append(_server(port))
            break
        except OSError:
            taken.append(port)
    sockets.append(_server(0))
    ports = [each.getsockname()[1] for each in sockets]
    if os.fork() == 0:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # whoever waits for the module's output must not wait for this
            os.dup2(nowhere, descriptor)
        deadline = time.monotonic() + given["wait_s"]
        for each in sockets:
            threading.Thread(target=_answer, args=(each, given["name"]), daemon=True).start()
        while time.monotonic() < deadline:
            time.sleep(0.2)
        os._exit(0)
    return {"ports": ports, "taken": taken, "is_free": len(ports) == 2 or not given["ports"]}


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port))


def _answer(server: socket.socket, name: str) -> None:
    while True:
        caller, _ = server.accept()
        with contextlib.suppress(OSError), caller:
            caller.sendall(name.encode())


def reach(given: dict[str, Any]) -> dict[str, Any]:
    """Call all ports of all others, at once; who answers must be who was meant."""
    problems: list[str] = []
    calls = [
        threading.Thread(target=_call, args=(each["name"], each["address"], port, problems))
        for each in given["others"]
        for port in each["ports"]
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    return {"problems": sorted(problems)}


def _call(name: str, address: str, port: int, problems: list[str]) -> None:
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as called:
            answer = called.recv(256).decode("utf-8", "replace")
    except OSError as error:
        why = error.strerror or str(error) or "no answer"
        problems.append(f"it does not reach {name} at {address} port {port} ({why}): a firewall, or another address?")
        return
    if answer != name:
        problems.append(f"at {address} port {port} it finds {answer or 'somebody else'}, not {name}: wrong address")


def main() -> None:
    """The module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "required": True, "choices": ["listening", "reached"]},
            "name": {"type": "str"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "wait_s": {"type": "float", "default": 60},
            "others": {"type": "list", "elements": "dict", "default": []},
        },
        required_if=[("state", "listening", ("name",))],
        supports_check_mode=True,
    )
    told = listen(module.params) if module.params["state"] == "listening" else reach(module.params)
    sys.stdout.flush()
    module.exit_json(changed=False, **told)


if __name__ == "__main__":
    main()
