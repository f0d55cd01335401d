"""Ansible's YAML inventory → the hosts of a job in their order, with their variables, as Ansible itself reads them.

Left out: `group_vars/` and `host_vars/` folders, templates and vaults.
"""

from __future__ import annotations

import ipaddress
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import UsageError

if TYPE_CHECKING:
    import yaml

NODES, NOT_NODES = "nodes", "controller"
_SECTIONS = ("hosts", "children", "vars")
_RANGE = re.compile(r"\[(?P<first>[^\[\]:]*):(?P<last>[^\[\]:]*)(?::(?P<step>\d+))?\]")
_PORT = re.compile(r"(?P<name>(?:[^:\[\]]|\[[^\[\]]*\])+):(?P<port>\d+)")


@dataclass(frozen=True)
class InventoryHost:
    """One host: its name in the inventory, and every variable that its groups and itself give it."""

    name: str
    variables: Mapping[str, Any]
    where: str
    """File and line of its first mention."""

    @property
    def address(self) -> str:
        """Where the other hosts reach it: `address`, else `ansible_host`, else its name."""
        return str(self.variables.get("address") or self.variables.get("ansible_host") or self.name)

    def slots(self, default: int | None) -> int:
        """Its ranks: `slots`, else the default. Raises UsageError."""
        value = self.variables.get("slots", default)
        if value is None:
            raise UsageError(
                f"{self.where}: host {self.name} has no `slots:` (its number of ranks); or --nproc-per-node"
            )
        if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
            raise UsageError(f"{self.where}: host {self.name}: slots must be a whole number, but is {value!r}")
        return int(value)


@dataclass
class _Group:
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


def read_inventory(path: Path) -> list[InventoryHost]:
    """Hosts of the group `nodes` in their order, or else all but those of the group `controller`.

    Raises UsageError with file, line and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--inventory: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--inventory: {path} is no text in UTF-8") from None
    reader = _Reader(path, text)
    names = reader.members(NODES) if NODES in reader.groups else reader.members("all", but=reader.members(NOT_NODES))
    if not names:
        raise UsageError(
            f"{path}: no hosts in the group `{NODES}`" + ("" if NODES in reader.groups else ", nor any else")
        )
    return [reader.host(name) for name in names]


def expand_range(pattern: str) -> list[str]:
    """Names of a pattern: `n[08:10]` is n08, n09, n10; `n[a:c]`, steps and several ranges work too. ValueError."""
    found = _RANGE.search(pattern)
    if found is None:
        if pattern.count("[") != pattern.count("]") or ("[" in pattern and ":" not in pattern):
            raise ValueError("a range is written [first:last]")
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    first, last, step = found["first"] or "0", found["last"], int(found["step"] or 1)
    if not last or not step:
        raise ValueError("a range needs an end, and a step above 0")
    if first.isdigit() and last.isdigit():
        if first.startswith("0") and len(first) > 1 and len(first) != len(last):
            raise ValueError("with leading zeros both ends must be equally long")
        width = len(first) if first.startswith("0") else 0
        values = [str(i).zfill(width) for i in range(int(first), int(last) + 1, step)]
    elif len(first) == len(last) == 1 and first in string.ascii_letters and last in string.ascii_letters:
        letters = string.ascii_letters
        values = list(letters[letters.index(first) : letters.index(last) + 1 : step])
    else:
        raise ValueError("both ends of a range must be numbers, or single letters")
    if not values:
        raise ValueError("a range must not run backwards")
    return [name for value in values for name in expand_range(head + value + tail)]


def is_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address, with or without brackets."""
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class _Reader:
    """One file. Groups may be mentioned in several places and are then merged, as Ansible does."""

    def __init__(self, path: Path, text: str) -> None:
        import yaml

        self.path = path
        self.groups: dict[str, _Group] = {"all": _Group()}
        self._lines: dict[str, int] = {}
        self._problems: list[str] = []
        self._flat: set[int] = set()
        try:
            self._loader = yaml.SafeLoader(text)
            root = self._loader.get_single_node()
        except yaml.YAMLError as error:
            raise UsageError(self._syntax(error, text)) from None
        if root is None:
            raise UsageError(f"{path}: empty; expected groups, such as `{NODES}:` with `hosts:`")
        try:
            for name, _, value in self._pairs(root, "groups"):
                self._group(name, value)
        except RecursionError:
            raise UsageError(f"{path}: an alias (`*name`) stands within what it stands for") from None
        for name in self.groups:
            if name != "all" and not any(name in group.children for group in self.groups.values()):
                self.groups["all"].children[name] = None
        for name in self.groups:
            self._refuse_cycle(name, ())
        if self._problems:
            raise UsageError(self._problems)

    def members(self, name: str, but: list[str] | None = None) -> list[str]:
        """Hosts of a group and those below it, nearest first; none where there is no such group."""
        found: dict[str, None] = {}
        level = [name] if name in self.groups else []
        while level:
            for group in level:
                found |= dict.fromkeys(self.groups[group].hosts)
            level = [child for group in level for child in self.groups[group].children]
        return [host for host in found if host not in (but or ())]

    def host(self, name: str) -> InventoryHost:
        """A host with its variables: nearer groups go before farther ones, and its own before all."""
        groups = sorted((self._depth(group), group) for group in self.groups if name in self.members(group))
        variables: dict[str, Any] = {}
        for _, group in groups:
            variables |= self.groups[group].variables
        for mentioned in self.groups.values():
            variables |= mentioned.hosts.get(name, {})
        for key in ("address", "ansible_host", "slots"):
            if "{{" in str(variables.get(key, "")):
                raise UsageError(
                    f"{self._at(name)}: host {name}: templates are not evaluated here: give {key} a plain value"
                )
        return InventoryHost(name, variables, self._at(name))

    def _at(self, host: str) -> str:
        return f"{self.path}:{self._lines[host]}"

    def _depth(self, name: str) -> int:
        parents = [parent for parent, group in self.groups.items() if name in group.children]
        return 1 + max(map(self._depth, parents), default=0) if name != "all" else 0

    def _refuse_cycle(self, name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise UsageError(f"{self.path}: group {name} is below itself: {' > '.join((*above, name))}")
        for child in self.groups[name].children:
            self._refuse_cycle(child, (*above, name))

    def _group(self, name: str, node: yaml.Node) -> None:
        group = self.groups.setdefault(name, _Group())
        for key, line, value in self._pairs(node, f"`hosts:`, `children:` or `vars:` in group {name}"):
            if key not in _SECTIONS:
                self._problem(line, f"group {name} has no key {key!r}: expected one of {', '.join(_SECTIONS)}")
            elif key == "vars":
                group.variables |= self._variables(value, f"variables of group {name}")
            elif key == "children":
                for child, _, inner in self._pairs(value, f"groups below {name}"):
                    group.children[child] = None
                    self._group(child, inner)
            else:
                for pattern, at, inner in self._pairs(value, f"hosts of group {name}"):
                    self._hosts(group, pattern, at, inner)

    def _hosts(self, group: _Group, pattern: str, line: int, node: yaml.Node) -> None:
        variables = self._variables(node, f"variables of host {pattern}")
        found = _PORT.fullmatch(pattern)
        if found:
            pattern, variables = found["name"], {"ansible_port": int(found["port"]), **variables}
        try:
            for name in [pattern.strip("[]")] if is_ipv6(pattern) else expand_range(pattern):
                group.hosts.setdefault(name, {}).update(variables)
                self._lines.setdefault(name, line)
        except ValueError as error:
            self._problem(line, f"host {pattern!r}: {error}")

    def _pairs(self, node: yaml.Node, expected: str) -> Iterator[tuple[str, int, yaml.Node]]:
        """Keys, their lines and their values; nothing for nothing. A lone word is a key without a value."""
        import yaml

        if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":null", ":str")):
            if node.tag.endswith(":str"):
                yield node.value, node.start_mark.line + 1, yaml.ScalarNode("tag:yaml.org,2002:null", "")
            return
        if not isinstance(node, yaml.MappingNode):
            found = "a list: write `name:`, not `- name`" if isinstance(node, yaml.SequenceNode) else repr(node.value)
            self._problem(node.start_mark.line + 1, f"expected {expected}, each a key with a colon; found {found}")
            return
        if id(node) not in self._flat:  # an alias leads here again
            self._flat.add(id(node))
            self._refuse_double_keys(node, expected)
            self._loader.flatten_mapping(node)
        pairs = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                pairs[key.value] = (line, value)
            else:
                self._problem(
                    line, f"expected {expected}: a name, not a structure; put names with brackets into quotes"
                )
        yield from ((name, line, value) for name, (line, value) in pairs.items())

    def _refuse_double_keys(self, node: yaml.MappingNode, expected: str) -> None:
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key.value, str):
                if key.value in seen:
                    self._problem(key.start_mark.line + 1, f"{key.value} is there twice: {expected} must differ")
                seen.add(key.value)

    def _variables(self, node: yaml.Node, expected: str) -> dict[str, Any]:
        import yaml

        values: dict[str, Any] = {}
        for name, _, value in self._pairs(node, expected):
            try:
                values[name] = self._loader.construct_object(value, deep=True)
            except yaml.constructor.ConstructorError:
                values[name] = None  # such as !vault: of no use here
        return values

    def _problem(self, line: int, words: str) -> None:
        self._problems.append(f"{self.path}:{line}: {words}")

    def _syntax(self, error: yaml.YAMLError, text: str) -> str:
        mark = getattr(error, "problem_mark", None)
        where = f"{self.path}:{mark.line + 1}" if mark else str(self.path)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        is_ini = re.search(r"^\[[\w:-]+\]\s*$", text, re.MULTILINE)
        hint = f"; an INI inventory becomes YAML by `ansible-inventory -i {self.path} --list --yaml`" if is_ini else ""
        return f"{where}: no YAML: {said}; expected groups with `hosts:` (mind colons and indentation){hint}"
