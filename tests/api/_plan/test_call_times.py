"""plan() and run() are on the critical path of every step: how much Python they are is pinned in
steps of the interpreter, which no load changes; times are printed, and bounded very loosely."""

import functools
import gc
import sys
import time
import weakref

import preflash
import pytest
import torch

PAGES = 132  # of each request

# Microseconds that would mean a mistake in kind.
GENEROUS = {1: 2000, 64: 2000, 1024: 10_000, 16_384: 100_000}


class Decoding:
    """A batch of one token each on keys in many pages; nothing of it is computed. Keys are not
    split: a plan that splits them takes a few steps more, whatever its size."""

    def __init__(self, batch: int) -> None:
        workspace = torch.empty(1 << 20, dtype=torch.uint8)
        self.wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="cpu")
        self.qo_indptr = torch.arange(batch + 1, dtype=torch.int32)
        self.indices = torch.arange(batch * PAGES, dtype=torch.int32)
        self.last_page_len = torch.ones(batch, dtype=torch.int32)

    def plan(self) -> None:
        self.wrapper.plan(
            self.qo_indptr, self.qo_indptr * PAGES, self.indices, self.last_page_len,
            32, 8, 128, 16, q_data_type=torch.bfloat16, disable_split_kv=True,
        )  # fmt: skip


def interpreter_steps(call) -> int:
    """Bytecodes that Python executes for a call, and for nothing that others left to be collected:
    finalizers and callbacks of weak references run where the collector happens to."""
    _traced_steps(lambda: None)  # The first trace of a process sees no opcodes on Python 3.12
    return _traced_steps(call)


def _traced_steps(call) -> int:
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return steps


def least_time(call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times)


def test_no_part_of_plan_is_a_loop_in_python():
    steps = []
    for batch in (2, 2000):
        batch = Decoding(batch)
        batch.plan()  # what is remembered from now on
        batch.plan()
        steps.append(interpreter_steps(batch.plan))
    assert steps[0] == steps[1] < 100


def test_steps_of_others_are_not_counted():
    """A cycle with a Python callback dies while a call is counted, if the collector runs there."""

    class Link:
        pass

    def call():
        return [[] for _ in range(10_000)]

    plain = interpreter_steps(call)
    ended = []
    link = Link()
    link.self = link
    weakref.finalize(link, lambda: ended.extend(i for i in range(100)))
    del link
    assert not ended
    assert interpreter_steps(call) == plain
    assert ended


@pytest.mark.parametrize(
    ("method", "options"),
    [("run", {}), ("run", {"out": True}), ("forward", {"causal": True})],
    ids=["run", "run_into_out", "forward"],
)
def test_run_takes_few_steps(method, options):
    """The options of forward(), which differ from plan()'s, are checked once for each plan."""
    empty = torch.zeros(2, dtype=torch.int32)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), backend="cpu"
    )
    q = torch.empty(0, 4, 64, dtype=torch.bfloat16)
    cache = torch.empty(0, 2, 16, 2, 64, dtype=torch.bfloat16)
    if "out" in options:
        options = {"out": torch.empty_like(q)}
    arrays = (empty, empty, empty[:0], empty[:1])
    call = functools.partial(getattr(wrapper, method), q, cache, **options)
    # Counted on Python 3.11: 107, 146 and 132 if torch lets C++ read its tensors; else about 300.
    # Other versions count their bytecodes otherwise.
    most = 200 if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else 600
    for window_left in (-1, 9):
        wrapper.plan(*arrays, 4, 2, 64, 16, q_data_type=torch.bfloat16, window_left=window_left)
        call()
        call()
        assert 50 < interpreter_steps(call) < most


@pytest.mark.parametrize("batch", GENEROUS)
def test_plan_time(batch, capsys):
    decoding = Decoding(batch)
    decoding.plan()
    least = least_time(decoding.plan, 20)
    with capsys.disabled():
        print(f"\nplan() of {batch} x {PAGES} pages: {least:.1f} us")
    assert 0 < least < GENEROUS[batch]
