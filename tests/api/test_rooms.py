"""Imports between the packages of preflash point one way, without a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import preflash

ROOT = Path(preflash.__file__).parent

# Each may import the ones before it; the public modules may import all of them.
ROOMS = ("_core", "_check", "_device", "_run", "_plan")
ROOMS += ("_compat", "_wrappers", "_fmha", "_pod")
PUBLIC, ON_TOP = len(ROOMS), ("_torch", "__init__", "testing", "cli", "__main__")


def modules() -> dict[tuple[str, ...], Path]:
    return {path.relative_to(ROOT).with_suffix("").parts: path for path in ROOT.rglob("*.py")}


def floor(module: tuple[str, ...]) -> int:
    if module[0] in ROOMS:
        return ROOMS.index(module[0])
    return PUBLIC + 1 + ON_TOP.index(module[0]) if module[0] in ON_TOP else PUBLIC


def imports(module: tuple[str, ...], path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the modules of this package that a module imports."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            bases = [tuple(parts[1:]) or ("__init__",) for parts in names if parts[0] == "preflash"]
            members: list[str] = []
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(node.module.split(".")) if node.module else ()
            if not node.level and parts[:1] != ("preflash",):
                continue
            package = module[: len(module) - node.level] if node.level else ()
            bases = [package + (parts if node.level else parts[1:])]
            members = [alias.name for alias in node.names]
        else:
            continue
        for base in bases:
            for name in members or [""]:
                member = (*base, name)
                if member in known or member == ("_core",):
                    yield member
                elif base in known:
                    yield base


def test_imports_point_one_way():
    upward = [
        (module, target)
        for module, path in modules().items()
        for target in imports(module, path)
        if floor(target) > floor(module)
    ]
    assert upward == []


def test_no_circle():
    graph = {module: set(imports(module, path)) for module, path in modules().items()}
    graphlib.TopologicalSorter(graph).prepare()
