"""Stand-ins for the modules of an engine that is not installed."""

from __future__ import annotations

import sys
import types


def add_modules(monkeypatch, modules):
    """Puts modules and the packages above them into sys.modules."""
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
