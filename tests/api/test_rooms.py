"""Imports between the packages of preflash point one way, without a circle."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import preflash

ROOT = Path(preflash.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
}
# Each may import the ones before it; the public modules may import all of them.
ROOMS = ("_core", "_check", "_device", "_run", "_plan", "_compat", "_wrappers", "_fmha", "_pod")
ON_TOP = ("_torch", "__init__", "testing", "cli", "__main__")


def floor(module: str) -> int:
    room = module.split(".")[1]
    if room in ROOMS:
        return ROOMS.index(room)
    return len(ROOMS) + 1 + ON_TOP.index(room) if room in ON_TOP else len(ROOMS)


def imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def test_imports_point_one_way_without_a_circle():
    members = {*MODULES, "preflash._core"}
    graph = {module: members.intersection(imports(module)) for module in MODULES}
    upward = [
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if floor(target) > floor(module)
    ]
    assert upward == []
    graphlib.TopologicalSorter(graph).prepare()
