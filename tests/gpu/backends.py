"""GPU tests run on every GPU backend, in streams and graphs of their own."""

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable

import pytest
import torch
from preflash.testing import Case, Inputs, build, poison, runner

GPU_BACKENDS = ("fa2", "fa3")

on_every_backend = pytest.mark.parametrize("backend", GPU_BACKENDS)


def backends_and_cases(cases: Iterable[Case]) -> list:
    """Returns values of ("backend", "case"): each case on each backend."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case.id}")
        for case in cases
        for backend in GPU_BACKENDS
    ]


def planned(case: Case, backend: str, **overrides) -> tuple:
    """Returns a planned wrapper with a workspace of its own, and its inputs."""
    inputs = build(case, device="cuda")
    return runner.planned(inputs, backend=backend, **overrides), inputs


def check_run(wrapper, inputs: Inputs, expected=None, **options) -> tuple:
    """Compares a run of a planned wrapper with the oracle; returns (out, lse)."""
    result = runner.run(wrapper, inputs, **options)
    runner.compare(inputs, *result, expected).check()
    return result


def assert_twenty_runs_are_equal(wrapper, inputs: Inputs) -> tuple:
    """The first of twenty runs of a planned wrapper is right, and the others equal it."""
    first = check_run(wrapper, inputs)
    for _ in range(19):
        assert all(map(torch.equal, runner.run(wrapper, inputs), first))
    return first


def poisoned(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Returns outputs for run() that are full of NaN."""
    case, shape = inputs.case, (inputs.q.shape[0], inputs.case.num_qo_heads)
    return {
        "out": poison((*shape, case.dim_vo), case.dtype_o, "cuda"),
        "lse": poison(shape, torch.float32, "cuda"),
    }


def captured(run: Callable, stream: torch.cuda.Stream | None = None) -> tuple:
    """Returns a graph of run(), and what run() returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return graph, result


@contextlib.contextmanager
def no_waits():
    """Makes torch raise where the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sleep(milliseconds: int = 50) -> None:
    """Occupies the current stream for about that time: a plan takes long where other tests share
    the machine."""
    torch.cuda._sleep(milliseconds * 2_000_000)


def overwrite_freed_memory(*sizes: int) -> list[torch.Tensor]:
    """Takes whatever the allocator has freed for the current stream, and fills it."""
    taken = [
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        for size in sizes or (512, 4096, 64 * 1024)
        for _ in range(32)
    ]
    for tensor in taken:
        tensor.fill_(255)
    return taken


def passes(program: str, backend: str) -> None:
    """Runs a program that prints "passed" in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), backend],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "passed", done.stdout + done.stderr
