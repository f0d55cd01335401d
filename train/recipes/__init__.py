"""The named configs that come with Muster: a YAML file each, that says what it changes against `baseline`."""

from __future__ import annotations

from pathlib import Path


def recipes() -> dict[str, Path]:
    """Their files by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_config(name: str) -> str:
    """The path of a recipe or file. A recipe's name wins over a file without suffix of the same name."""
    return str(recipes().get(name, name))
