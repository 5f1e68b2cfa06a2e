"""plan() and run() are on the critical path of every step: C++ makes a repeated call, so that
Python enters few functions."""

import functools
import gc
import itertools
import sys

import pytest
import torch
from planned_cases import bounds_of, table, tensors
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner
from wrapper_options import block_table, graph_options

LENGTHS = ((3, 0, 9), (40, 0, 64))
PAGED, RAGGED = (
    Case("times", *LENGTHS, 4, 2, 64, page_size=size, mask=MaskKind.CAUSAL) for size in (16, 0)
)


def functions_of(call) -> int:
    """Counts the functions of Python that a call enters. Garbage of other tests would enter its
    own."""
    entered = []
    gc.disable()
    sys.setprofile(lambda frame, event, _: entered.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(entered)


def check_repeated(call, most: int) -> None:
    """Requires few functions of a repeated call, where a first one enters dozens."""
    first, _, third = (functions_of(call) for _ in range(3))
    assert third <= most < first / 2


def plan_of(kind: str):
    inputs = build(RAGGED if kind == "ragged" else PAGED)
    if kind == "decode":
        wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace(), backend="cpu")
        arguments, options = (*table(inputs), 4, 2, 64, 16), {"q_data_type": PAGED.dtype}
        return functools.partial(fast_decode_plan, wrapper, *arguments, **options)
    if kind == "block table":
        inputs.indices = block_table(inputs)
    for_graphs = graph_options(inputs) if kind == "graphs" else {}
    wrapper = runner.make_wrapper(inputs.case, backend="cpu", **for_graphs)
    arguments, options = runner.plan_arguments(inputs)
    more = bounds_of(inputs) if kind == "upper bounds" else {}
    plan = wrapper.begin_forward if kind == "begin_forward" else wrapper.plan
    return functools.partial(plan, *arguments, **options, **more)


@pytest.mark.parametrize(
    "kind",
    ["paged", "ragged", "block table", "upper bounds", "begin_forward", "graphs", "decode"],
)
def test_a_repeated_plan_is_made_in_cpp(kind):
    check_repeated(plan_of(kind), most=2)


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
@pytest.mark.parametrize("call", ["run", "run into out", "forward", "skip tiles"])
def test_a_repeated_run_is_made_in_cpp(case, call):
    """The options of forward(), which differ from plan()'s, are checked once for each plan; a
    factor by which tiles are left out is no other plan."""
    inputs, wrapper = build(case), runner.make_wrapper(case, backend="cpu")
    run, factors = functools.partial(wrapper.run, *tensors(inputs)), itertools.count(1)
    calls = {
        "run": run,
        "run into out": functools.partial(run, out=torch.empty_like(inputs.q)),
        "forward": functools.partial(wrapper.forward, *tensors(inputs), sm_scale=0.3),
        "skip tiles": lambda: run(skip_softmax_threshold_scale_factor=next(factors)),
    }
    for window_left in (-1, 9):
        runner.plan(wrapper, inputs, window_left=window_left)
        check_repeated(calls[call], most=40 if call == "skip tiles" else 8)
