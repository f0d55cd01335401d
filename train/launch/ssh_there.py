"""On a host: what `fab` asks it to do. Sent as text, and run there by its own Python: 3.9, and nothing beside it.

Of a user's values none comes to stand in a command line that a list of processes would show.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import types
from typing import Any


def main(text: str) -> None:
    """Do it, and print what came of it: `failed` and `msg` where it could not be."""
    told = json.loads(text)
    for name, source in told["sources"].items():
        sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), sys.modules[name].__dict__)  # noqa: S102 - ours, from where `fab` is
    states = sys.modules["ansible.module_utils.muster_states"]
    given = told["given"]
    for name in ("folder", "home", "runs", "code"):
        given[name] = _expanded(given[name]) if given.get(name) else given.get(name)
    pythons = [_expanded(path) for path in given.get("pythons") or ["python3"]]
    given["python"] = ([path for path in pythons if pathlib.Path(path).exists()] + pythons)[0]
    given.update(uid=os.getuid(), gid=os.getgid(), watcher=[os.getuid(), os.getgid()])
    if given.get("runtime") == "docker" and given.get("environment"):
        given["options"] = [*given["options"], *out_of_sight(given.pop("environment"))]
        given["environment"] = {}
    try:
        answer = states.STATES[told["state"]](given, pathlib.Path(given["folder"]))
    except (states.RefusalError, OSError) as error:
        answer = {"failed": True, "msg": str(error)}
    paths = {name: given[name] for name in ("folder", "home", "runs", "python")}
    print(json.dumps({**answer, "paths": paths, "has_home": pathlib.Path(given["home"] or "/").exists()}))


def _expanded(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib's fails for ~nobody


def out_of_sight(variables: dict[str, Any]) -> list[str]:
    """Options of `docker run` that set these variables, and do not show their values.

    They are in a file that has no name, in memory, which the client reads from this process. A value of several lines
    cannot be in it: the client takes that one from its own environment.
    """
    plain = {name: str(value) for name, value in variables.items()}
    long = {name: value for name, value in plain.items() if len(f"{value}.".splitlines()) > 1}
    file = os.memfd_create("variables")
    rows = (f"{name}={value}\n" for name, value in plain.items() if name not in long)
    os.write(file, "".join(rows).encode("utf-8", "surrogateescape"))
    os.environ.update(long)
    names = [word for name in long for word in ("--env", name)]
    return ["--env-file", f"/proc/{os.getpid()}/fd/{file}", *names]
