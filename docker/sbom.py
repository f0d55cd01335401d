"""Prints a bill of materials (CycloneDX 1.6, JSON) of this environment: Python's packages and Debian's."""

from __future__ import annotations

import json
import os
import subprocess
from importlib import metadata
from urllib.parse import quote


def python_packages() -> list[dict[str, object]]:
    """The installed distributions."""
    found = {}
    for package in metadata.distributions():
        name, version = package.metadata["Name"], package.version
        licence = package.metadata.get("License-Expression")
        found[name.lower()] = {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}",
            **({"licenses": [{"expression": licence}]} if licence else {}),
        }
    return [found[name] for name in sorted(found)]


def debian_packages() -> list[dict[str, object]]:
    """What dpkg has installed."""
    with open("/etc/os-release") as lines:  # noqa: PTH123
        system = dict(line.rstrip().replace('"', "").split("=", 1) for line in lines if "=" in line)["ID"]
    asked = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"]
    rows = [row.split("\t") for row in subprocess.check_output(asked, text=True).splitlines()]  # noqa: S603
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/{system}/{quote(name)}@{quote(version)}?arch={architecture}",
        }
        for name, version, architecture in rows
    ]


def main() -> None:
    """Print it. No serial number and no time: the same image has the same bill."""
    components = python_packages() + debian_packages()
    component = {"type": "container", "name": "muster", "version": os.environ["PYTORCH_VERSION"]}
    document = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": component}, "components": components,
    }  # fmt: skip
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
