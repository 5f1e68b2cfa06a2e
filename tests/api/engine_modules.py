"""Tests of engines' backends share stand-ins for modules that are not installed, and checks."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types

import pytest
from preflash import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper


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


def import_afresh(monkeypatch, names):
    """Imports modules of preflash on the stand-ins; the test's end forgets them."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return [importlib.import_module(name) for name in names]


@dataclasses.dataclass
class Request:
    """A request of a step. The new tokens are the last of its keys; encoder: tokens of an encoder
    before them."""

    new: int
    total: int
    encoder: int = 0


MIXED = (Request(1, 40), Request(7, 7), Request(3, 50), Request(1, 17))
DECODES = tuple(Request(1, n) for n in (40, 7, 50, 17))


def close(got, wanted, tolerance=0.01):
    assert got.shape == wanted.shape
    error = (got.double().cpu() - wanted).abs().max()
    assert error < tolerance * max(1.0, float(wanted.abs().max())), error


@pytest.fixture(name="plans")
def recorded_plans(monkeypatch):
    """Records the calls of plan()."""
    calls = []

    def record(plan):
        def recorded(self, *args, **options):
            calls.append(self)
            return plan(self, *args, **options)

        return recorded

    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        monkeypatch.setattr(wrapper, "plan", record(wrapper.plan))
    return calls
