"""Tests of engines' backends share stand-ins for modules that are not installed, and checks."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import types

import pytest
import torch
from preflash import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from preflash.testing.oracle import attend


def add_modules(monkeypatch, modules):
    """Puts modules and the packages above them into sys.modules, and each into the one above."""
    paths = (itertools.accumulate(name.split("."), "{}.{}".format) for name in modules)
    names = set(itertools.chain.from_iterable(paths))
    for name in sorted(names):  # packages first
        module = types.ModuleType(name)
        if name in modules:
            vars(module).update(modules[name])
        else:
            module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)


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


def attended(pipeline, requests, q, keys, masks=None):
    """Computes the oracle's output for the rows of q of every request, whose keys are (k, v)."""
    rows = q.split([request.new for request in requests])
    masks = masks or [None] * len(requests)
    return torch.cat([
        attend(row, k, v, pipeline, custom=mask).out
        for row, (k, v), mask in zip(rows, keys, masks, strict=True)
    ])  # fmt: skip


def through(x, dtype, scale):
    """Returns x as it comes out of a cache of 8 bits."""
    return (x / scale).to(dtype).float() * scale


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
