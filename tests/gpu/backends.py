"""Runs of the GPU tests: compared with the oracle, captured, on busy streams, in processes."""

import contextlib
from collections.abc import Callable, Iterable

import pytest
import torch
from preflash.testing import Case, Inputs, build, poison, runner
from processes import python


def on_cases(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Parametrizes a test by "case"."""
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.id)


def check(case: Case, backend: str) -> None:
    """Compares a run of a new wrapper with the oracle."""
    runner.check(build(case, device="cuda"), backend=backend)


def planned(case: Case, backend: str, **overrides) -> tuple:
    """Returns a planned wrapper with a workspace of its own, and its inputs."""
    inputs = build(case, device="cuda")
    return runner.planned(inputs, backend=backend, **overrides), inputs


def check_run(wrapper, inputs: Inputs, expected=None, **options) -> tuple:
    """Compares a run of a planned wrapper with the oracle; returns (out, lse)."""
    result = runner.run(wrapper, inputs, **options)
    runner.compare(inputs, *result, expected).check()
    return result


def same_bits(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def check_runs(wrapper, inputs: Inputs, count: int = 20) -> tuple:
    """The first of some runs of a planned wrapper is right, and the others have its bits."""
    first = check_run(wrapper, inputs)
    for _ in range(count - 1):
        assert same_bits(runner.run(wrapper, inputs), first)
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


def replay(graph: torch.cuda.CUDAGraph, *outputs: torch.Tensor) -> None:
    """Fills the outputs with NaN, replays the graph and waits for it."""
    for tensor in outputs:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()


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
    """Occupies the current stream for about that time."""
    torch.cuda._sleep(milliseconds * 2_000_000)


def overwrite_freed_memory(*sizes: int) -> None:
    """Takes whatever the allocator has freed for the current stream, and fills it."""
    taken = []
    for size in sizes or (512, 4096, 64 * 1024):
        taken += [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(32)]


def output_of(program: str, *arguments: str, **environment: str) -> str:
    """Returns what a program prints in a process of its own, which must not fail."""
    try:
        return python(program, *arguments, **environment)
    except AssertionError as error:  # ends with what the program wrote to stderr
        if "NotImplementedError" in str(error):
            raise NotImplementedError(str(error).strip().splitlines()[-1]) from error
        raise
