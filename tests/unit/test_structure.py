"""The rules the package is built by: who imports whom, what stays short, what says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment

FILES = sorted((ROOT / "train").rglob("*.py"))
FREE_OF_TORCH = [
    "config", "rules", "options", "identity", "errors", "seam", "run_folder", "progress", "network", "health",
    "evidence", "failure", "cli", "report.command", "watching",
]  # fmt: skip
SIBLINGS = ["models", "data", "precision", "checkpoint", "metrics", "optim", "health"]
REPORT = {f"train.report.{path.stem}" for path in (ROOT / "train" / "report").glob("[!_]*.py")} | {"train.report"}
OF_BOTH_PLANES = {"train", "train.seam", "train.errors", "train.network", "train.slurm_lists"} | REPORT
LONGEST_FUNCTION, LONGEST_FILE = 60, 400

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    """`train.data.order` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imports_of(module: str) -> set[tuple[str, str]]:
    """(module, name or "") for everything that it imports anywhere, within functions too."""
    found: set[tuple[str, str]] = set()
    package = module if f"{module}." in " ".join(f"{name}." for name in TREES if name != module) else ""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = (package or module.rpartition(".")[0]).split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                is_module = f"{base}.{alias.name}" in TREES
                found.add((f"{base}.{alias.name}", "") if is_module else (base, alias.name))
    return found


def area_of(module: str) -> str:
    """`data` for train.data.order; the package itself is ``."""
    return module.split(".")[1] if module.startswith("train.") else ""


def definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Top-level classes and functions, and methods, with dotted names."""
    for node in tree.body:
        if isinstance(node, Definition):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, Definition))


def test_there_is_something_to_look_at() -> None:
    assert {"train", "train.loop", "train.data", "train.data.order", "train.strategies.ddp"} <= set(TREES)
    assert ("train.data", "Spec") in imports_of("train.models")
    assert ("train.job", "run") in imports_of("train.cli")  # within a function
    assert ("train.data.tokens", "") in imports_of("train.data.sources")  # `from train.data import tokens`


def test_what_must_start_fast_does_not_import_torch() -> None:
    script = "import importlib, sys\n" + "".join(
        f"importlib.import_module('train.{name}')\nprint('train.{name}', 'torch' in sys.modules)\n"
        for name in FREE_OF_TORCH
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"train.{name} False" for name in FREE_OF_TORCH]


def test_the_seam_needs_the_standard_library_alone() -> None:
    assert {name.split(".")[0] for name, _ in imports_of("train.seam")} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", [name for name in TREES if area_of(name) in SIBLINGS])
def test_siblings_do_not_import_each_other(module: str) -> None:
    others = {
        (name, what)
        for name, what in imports_of(module)
        if area_of(name) in SIBLINGS and area_of(name) != area_of(module)
    }
    allowed = {("train.data", "Spec")} if module == "train.models" else set()
    assert others <= allowed


ABOVE = {  # which areas an area may not import: those that stand above it
    "strategies": {"loop", "job", "cli", "state", "meter", "summary", "models", "data"},
    "runtime": {"strategies", "loop", "job", "cli", "state", *SIBLINGS},
    "config": {"runtime", "strategies", "loop", "job", "cli", "state", "rules", "options", "identity", *SIBLINGS},
    "identity": {"runtime", "strategies", "loop", "job", "cli", "state", "run_folder", *SIBLINGS},
    "loop": {"job", "cli", "run_folder", "identity", "options"},
    **{name: {"strategies", "loop", "job", "cli", "state", "meter", "summary"} for name in SIBLINGS},
}


@pytest.mark.parametrize("module", [name for name in TREES if area_of(name) in ABOVE])
def test_nothing_imports_what_stands_above_it(module: str) -> None:
    assert {area_of(name) for name, _ in imports_of(module)} & ABOVE[area_of(module)] == set()


@pytest.mark.parametrize("module", [name for name in TREES if name != "train.__main__"])
def test_nothing_imports_the_command_line(module: str) -> None:
    assert "train.cli" not in {name for name, _ in imports_of(module)}


@pytest.mark.parametrize("module", [name for name in TREES if area_of(name) != "launch"])
def test_the_training_plane_imports_nothing_of_the_launch_plane_but_by_commands(module: str) -> None:
    if module != "train.cli":
        assert "launch" not in {area_of(name) for name, _ in imports_of(module)}


@pytest.mark.parametrize("module", [name for name in TREES if area_of(name) == "launch"])
def test_the_launch_plane_needs_no_torch_and_of_the_training_plane_only_what_is_of_both(module: str) -> None:
    imported = {name for name, _ in imports_of(module)}
    of_ours = {name for name in imported if name.split(".")[0] == "train" and area_of(name) != "launch"}
    assert of_ours <= OF_BOTH_PLANES
    assert not {name for name in imported if name.split(".")[0] in ("torch", "numpy", "rich", "jsonargparse")}


@pytest.mark.parametrize("module", sorted(OF_BOTH_PLANES & set(TREES)))
def test_what_both_planes_use_is_cheap_to_import(module: str) -> None:
    """Only the standard library when it is loaded; what more it needs comes when it is called."""
    top = {
        name.split(".")[0]
        for node in TREES[module].body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert top - {"train"} <= sys.stdlib_module_names
    assert {name for name, _ in imports_of(module) if name.startswith("train")} <= OF_BOTH_PLANES


@pytest.mark.parametrize("module", [name for name in TREES if name != "train.identity"])
def test_who_this_process_is_is_read_in_one_place(module: str) -> None:
    """RANK and the like: read by the identity alone, whatever function reads the environment."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    read = {
        node.value
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value in names or node.value.startswith(("SLURM_", "OMPI_")))
    }
    assert read == set() or area_of(module) == "launch"


@pytest.mark.parametrize("module", TREES)
def test_functions_are_short(module: str) -> None:
    lengths = {
        name: (node.end_lineno or 0) - node.lineno + 1
        for name, node in definitions(TREES[module])
        if not isinstance(node, ast.ClassDef)
    }
    long = {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}
    assert long.keys() <= ({"fit"} if module == "train.loop" else set()), long
    assert max(lengths.values(), default=0) <= 80  # the loop's own budget


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("module", TREES)
def test_every_module_public_class_and_function_says_what_it_is(module: str) -> None:
    silent = [] if ast.get_docstring(TREES[module]) else ["the module itself"]
    for name, node in definitions(TREES[module]):
        is_public = not any(part.startswith("_") for part in name.split("."))
        if is_public and not ast.get_docstring(node):
            silent.append(name)
    assert silent == []
