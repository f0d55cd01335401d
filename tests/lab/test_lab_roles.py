"""What a role promises: settings with a meaning and a type, a wrong one refused, a page to read. Needs no lab."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import ROOT, clean_environment

ROLES = sorted(path.parent.parent for path in (ROOT / "ansible/roles").glob("*/meta/argument_specs.yml"))
WRONG: dict[str, Any] = {
    "int": "many", "float": "some", "bool": "perhaps", "dict": "none at all", "list": {"a": 1},
}  # fmt: skip
"""A value for each type that it must refuse. Text and paths take anything, unless there are choices."""


def options(role: Path) -> dict[str, dict[str, Any]]:
    spec = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]
    return dict(spec["options"])


def names(roles: list[Path]) -> list[tuple[Path, str]]:
    return [(role, name) for role in roles for name in options(role)]


def test_every_role_has_argument_specs() -> None:
    assert [role.name for role in ROLES] == sorted(path.name for path in (ROOT / "ansible/roles").iterdir())
    assert len(ROLES) >= 7


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_defaults_are_its_documented_interface(role: Path) -> None:
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    assert set(defaults) == set(options(role))
    assert all(len(option["description"]) > 10 for option in options(role).values())
    assert f"# {role.name}" in (role / "README.md").read_text()


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_entry_is_short(role: Path) -> None:
    assert len((role / "tasks/main.yml").read_text().splitlines()) <= 50


@pytest.mark.parametrize(("role", "name"), names(ROLES), ids=lambda value: getattr(value, "name", value))
def test_a_wrong_type_is_refused(role: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same code with which Ansible validates a role's arguments."""
    # Importing it replaces sys.intern, which torch's compiler cannot bear: other tests may load that later.
    monkeypatch.setattr(sys, "intern", sys.intern)
    from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

    option = options(role)[name]
    wrong = "neither" if "choices" in option else WRONG.get(option["type"])
    if wrong is None:
        assert option["type"] in ("str", "path", "raw")
        return
    spec = {name: {key: value for key, value in option.items() if key != "description"}}
    assert ArgumentSpecValidator(spec).validate({name: wrong}).error_messages


def test_networks_in_whatever_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "intern", sys.intern)
    spec = importlib.util.spec_from_file_location("filters", ROOT / "ansible/filter_plugins/muster.py")
    assert spec is not None
    assert spec.loader is not None
    filters = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(filters)
    of = filters.FilterModule().filters()["muster_networks"]
    both = {"ip": ["10.0.0.0/24", "10.1.0.0/16"], "ip6": ["fd00::/64"], "wrong": []}
    all_ = ["10.0.0.0/24", "fd00::/64", "10.1.0.0/16"]
    assert of(["10.0.0.0/24", "fd00::/64,10.1.0.9/16"]) == {**both, "all": all_}
    assert of("10.0.0.0/24, fd00::/64 ,10.1.0.0/16") == {**both, "all": all_}
    assert of("") == {"ip": [], "ip6": [], "all": [], "wrong": []}
    assert of("10.0.0/24,x")["wrong"] == ["10.0.0/24", "x"]


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_ansible_refuses_it_before_the_first_task(role: Path, tmp_path: Path) -> None:
    name, option = next(
        (name, option) for name, option in options(role).items() if "choices" in option or option["type"] in WRONG
    )
    wrong = "neither" if "choices" in option else WRONG[option["type"]]
    play = tmp_path / "play.yml"
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps({"nodes": {"hosts": {"localhost": {}}}}))
    play.write_text(
        json.dumps(
            [{"hosts": "localhost", "gather_facts": True, "gather_subset": ["!all", "virtual"], "roles": [str(role)]}]
        )
    )
    command = [
        str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), "-c", "local", "--check",
        "-e", json.dumps({name: wrong}), str(play),
    ]  # fmt: skip
    variables = tmp_path / "group_vars"
    variables.mkdir()
    (variables / "all.yml").write_text((ROOT / "ansible/group_vars/all.yml").read_text())
    done = subprocess.run(
        command, cwd=ROOT / "ansible", env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    said = re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert done.returncode != 0
    assert "Validation of arguments failed" in said, said
    assert name in said
    assert "PLAY RECAP" in said
    assert re.search(r"ok=1 +changed=0", said), said
