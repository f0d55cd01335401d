#!/usr/bin/python
"""An Ansible module: what a host is fit for, and Muster's agent on it: started, asked to stop, ended, listed.

Its options are documented in muster_agent.yml; what is done, in module_utils/muster_states.py.
"""

from __future__ import annotations

import base64
import json
import pathlib
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_launch import RefusalError
from ansible.module_utils.muster_states import STATES


def main() -> None:
    """The module."""
    text, path, strings = {"type": "str"}, {"type": "path"}, {"type": "list", "elements": "str", "default": []}
    table: dict[str, Any] = {"type": "dict", "default": {}}
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "required": True, "choices": [*STATES]},
            "folder": {"type": "path", "required": True},
            "launch": text, "run_id": text, "by": {"type": "str", "default": "somebody"},
            "wait_s": {"type": "float", "default": 60},
            "runtime": {"type": "str", "choices": ["docker", "venv"], "default": "docker"},
            "image": text, "home": path, "runs": path, "uid": {"type": "int"},
            "watcher": {"type": "list", "elements": "int", "default": [0, 0]},
            "arguments": strings, "command": strings, "about": table, "files": table,
            "secret": {"type": "str", "no_log": True}, "gpus": {"type": "int", "default": 0},
            "share": {"type": "bool", "default": False}, "environment": {"type": "str", "no_log": True},
            "mounts": strings, "options": strings,
            "code": path,
        },
        required_if=[
            ("state", "probed", ("runs", "uid")),
            ("state", "inspected", ("launch", "runs", "uid", "arguments")),
            ("state", "started", ("launch", "runs", "uid", "arguments", "command")),
            ("state", "ended", ("launch",)),
        ],
        supports_check_mode=True,
    )  # fmt: skip
    # One word that says nothing: each value that must not be logged is blotted out of all that is told, even a mere 1.
    variables = json.loads(base64.b64decode(module.params["environment"] or "") or b"{}")
    given = {**module.params, "environment": variables}  # a copy: Ansible shows its own
    if module.check_mode and given["state"] in ("started", "asked", "ended"):
        module.exit_json(changed=True)
    try:
        told = STATES[given["state"]](given, pathlib.Path(given["folder"]))
    except (RefusalError, OSError) as error:
        module.fail_json(msg=str(error), is_up=False)
    module.exit_json(**{"changed": False, **told})


if __name__ == "__main__":
    main()
