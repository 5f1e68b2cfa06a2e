"""Timers: kernel time by CUDA-graph replay, CPU time of a call, and wall time on the CPU.

All give the median of several samples, in microseconds of one call.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]


class GraphReplay:
    """One `call`, which must be capturable once it ran on the stream of the capture, launched
    `calls` times in one CUDA graph."""

    def __init__(self, call: Call, calls: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self._calls = calls
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            for _ in range(calls):
                call()
        self.sample()

    def sample(self) -> float:
        """Microseconds of one call in one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / self._calls


def interleaved(replays: Mapping[str, GraphReplay], samples: int) -> dict[str, float]:
    """Interleaved times: `samples` rounds, each of which takes one sample of every replay.

    A GPU at its power limit slows down and recovers, so a sample depends on what ran before it.
    Every round has a random order of its own, so that each replay runs after every other one.
    """
    order = list(replays)
    shuffle = random.Random(0).shuffle
    taken: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(samples):
        shuffle(order)
        for name in order:
            taken[name].append(replays[name].sample())
    return {name: statistics.median(values) for name, values in taken.items()}


def cpu_call_time(
    call: Call,
    *,
    calls: int = 50,
    samples: int = 11,
    device: str = "cuda",
    min_seconds: float = 0.0,
) -> float:
    """Time the CPU spends in one `call`; the GPU is drained between samples, so that its queue
    never fills. Takes further samples until `min_seconds` have passed."""
    drain = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for _ in range(min(calls, 5)):
        call()
    taken: list[float] = []
    deadline = time.perf_counter() + min_seconds
    while len(taken) < samples or time.perf_counter() < deadline:
        drain()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - begin) * 1e6 / calls)
    drain()
    return statistics.median(taken)


def cpu_wall_time(call: Call, *, min_samples: int = 3) -> float:
    """Wall time of one `call` that computes on the CPU, the median of samples of 0.3 s."""
    return cpu_call_time(call, calls=1, samples=min_samples, device="cpu", min_seconds=0.3)
