"""plan() and run() are on the critical path of every step: C++ makes a repeated call, so that
Python enters few functions."""

import functools
import itertools
import sys

import pytest
import torch
from planned_cases import bounds_of, planned, table, tensors, unplanned
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner
from wrapper_options import graph_options, hints

LENGTHS = ((3, 0, 9), (40, 0, 64))
PAGED, RAGGED = (
    Case("times", *LENGTHS, 4, 2, 64, page_size=size, mask=MaskKind.CAUSAL) for size in (16, 0)
)
on_the_cpu = pytest.mark.parametrize("target", ["cpu"], indirect=True)


def functions_of(call) -> int:
    """Counts the functions of Python that a call enters."""
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)


def check_repeated(call, most: int) -> None:
    """Requires few functions of a repeated call, where a first one enters dozens."""
    first, _, third = (functions_of(call) for _ in range(3))
    assert third <= most < first / 2


@pytest.mark.parametrize(
    "kind",
    ["paged", "ragged", "block table", "upper bounds", "begin_forward", "graphs", "decode"],
)
def test_a_repeated_plan_is_made_in_cpp(kind):
    inputs = build(RAGGED if kind == "ragged" else PAGED)
    if kind == "decode":
        wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace(), backend="cpu")
        arguments = (*table(inputs), 4, 2, 64, 16)
        plan = functools.partial(fast_decode_plan, wrapper, *arguments, q_data_type=PAGED.dtype)
        check_repeated(plan, most=2)
        return
    if kind == "block table":
        inputs.indices = hints(inputs)["block_tables"]
    for_graphs = graph_options(inputs) if kind == "graphs" else {}
    wrapper = runner.make_wrapper(inputs.case, backend="cpu", **for_graphs)
    arguments, options = runner.plan_arguments(inputs)
    more = bounds_of(inputs) if kind == "upper bounds" else {}
    plan = wrapper.begin_forward if kind == "begin_forward" else wrapper.plan
    check_repeated(functools.partial(plan, *arguments, **options, **more), most=2)


def run_of(call: str, wrapper, inputs):
    """Returns a call of run() or forward()."""
    given = tensors(inputs)
    if call == "skip tiles":
        factors = itertools.count(1)
        return lambda: wrapper.run(*given, skip_softmax_threshold_scale_factor=next(factors))
    if call == "forward":
        return functools.partial(wrapper.forward, *given, sm_scale=0.3)
    options = {"out": torch.empty_like(inputs.q)} if call == "run into out" else {}
    return functools.partial(wrapper.run, *given, **options)


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
@pytest.mark.parametrize("call", ["run", "run into out", "forward", "skip tiles"])
@on_the_cpu
def test_a_repeated_run_is_made_in_cpp(target, case, call):
    """The options of forward(), which differ from plan()'s, are checked once for each plan; a
    factor by which tiles are left out is no other plan."""
    inputs, wrapper = unplanned(case, target)
    for window_left in (-1, 9):
        runner.plan(wrapper, inputs, window_left=window_left)
        check_repeated(run_of(call, wrapper, inputs), most=40 if call == "skip tiles" else 8)


@on_the_cpu
def test_the_oldest_of_many_forward_calls_is_forgotten(target):
    inputs, wrapper = planned(PAGED, target)

    def functions(sm_scale: float) -> int:
        return functions_of(lambda: wrapper.forward(*tensors(inputs), sm_scale=sm_scale))

    first, again = functions(1.0), functions(1.0)
    assert again < first / 4
    for number in range(16):
        functions(2.0 + number)
    assert functions(1.0) > 4 * again > 4 * functions(17.0) - 4
