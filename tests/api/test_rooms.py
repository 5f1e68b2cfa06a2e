"""Imports between the packages of preflash point one way, without a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import preflash

ROOT = Path(preflash.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in ROOT.rglob("*.py")}

# Each may import the ones before it; the public modules may import all of them.
ROOMS = ("_core", "_check", "_device", "_run", "_plan")
ROOMS += ("_compat", "_wrappers", "_fmha", "_pod")
PUBLIC, ON_TOP = len(ROOMS), ("_torch", "__init__", "testing", "cli", "__main__")


def floor(module: tuple[str, ...]) -> int:
    if module[0] in ROOMS:
        return ROOMS.index(module[0])
    return PUBLIC + 1 + ON_TOP.index(module[0]) if module[0] in ON_TOP else PUBLIC


def imports(module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the modules of this package that a module imports."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            bases = [tuple(parts[1:]) or ("__init__",) for parts in names if parts[0] == "preflash"]
            members = [""]
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(node.module.split(".")) if node.module else ()
            if not node.level and parts[:1] != ("preflash",):
                continue
            bases = [module[: len(module) - node.level] + parts if node.level else parts[1:]]
            members = [alias.name for alias in node.names]
        else:
            continue
        for base in bases:
            for member in ((*base, name) for name in members):
                if member in MODULES or member == ("_core",):
                    yield member
                elif base in MODULES:
                    yield base


def test_imports_point_one_way_without_a_circle():
    graph = {module: set(imports(module)) for module in MODULES}
    upward = [
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if floor(target) > floor(module)
    ]
    assert upward == []
    graphlib.TopologicalSorter(graph).prepare()
