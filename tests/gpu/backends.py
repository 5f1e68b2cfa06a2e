"""GPU tests run on every GPU backend."""

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
    """Values of ("backend", "case"): each case on each backend."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case.id}")
        for case in cases
        for backend in GPU_BACKENDS
    ]


def planned(case: Case, backend: str, **overrides) -> tuple:
    """Returns a planned wrapper with a workspace of its own, and its inputs."""
    inputs = build(case, device="cuda")
    return runner.planned(inputs, backend=backend, **overrides), inputs


def poisoned(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Outputs of run() that are full of NaN."""
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
