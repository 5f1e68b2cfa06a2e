"""Tests of engines' backends share the stand-ins of tests/engines, requests and checks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from engines.stand_ins import Finder
from preflash import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from preflash.testing.oracle import attend


@contextlib.contextmanager
def stand_ins(engine, modules, integration=()):
    """Imports modules of preflash.integrations.ENGINE while every module of the engine is a
    stand-in.

    modules: values of the engine's modules, by path; other names compute nothing.
    """
    finder = Finder(Path(), engine, real=(), absent=())
    finder.values = {f"{engine}.{name}": values for name, values in modules.items()}
    path = f"preflash.integrations.{engine}."

    def forget():
        for name in [*sys.modules]:
            if name.partition(".")[0] == engine or name.startswith(path):
                del sys.modules[name]

    forget()
    finder.install()
    try:
        yield [importlib.import_module(path + name) for name in integration]
    finally:
        sys.meta_path.remove(finder)
        forget()


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


def captured(run, device):
    """Captures run() in a CUDA graph and returns its replay(); on the CPU a run takes its place."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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
