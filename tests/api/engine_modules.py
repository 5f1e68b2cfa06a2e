"""add_modules() stands in for the modules of an engine that is not installed."""

from __future__ import annotations

import sys
import types


def add_modules(monkeypatch, modules):
    """Puts modules and the packages above them into sys.modules, and each into the one above."""
    for name in modules:
        parts = name.split(".")
        for i in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:i]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
    for name, values in modules.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in {part for module in modules for part in _prefixes(module)}:
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, sys.modules[name])


def _prefixes(name):
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
