"""plan() and run() are on the critical path of every step: a repeated call is made in C++, and
how many bytecodes Python executes for it does not depend on the batch."""

import dataclasses
import functools
import itertools

import pytest
import torch
from bounds import bounds_of
from interpreter_steps import interpreter_steps
from planned_cases import planned, tensors, unplanned
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner
from wrapper_options import graph_options, hints

PAGED = Case("paged", (3, 0, 9), (40, 0, 64), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
DECODE = dataclasses.replace(PAGED, name="decode", qo_lens=(1, 1, 1), mask=MaskKind.NONE)
SCALES = (1, 60)  # of the number of requests


def scaled(case: Case, scale: int) -> Case:
    return dataclasses.replace(case, qo_lens=case.qo_lens * scale, kv_lens=case.kv_lens * scale)


def plan_of(kind: str, scale: int):
    """Returns a call of plan() for a wrapper of its own."""
    case = scaled({"ragged": RAGGED, "decode": DECODE}.get(kind, PAGED), scale)
    inputs, more = build(case), {}
    if kind == "block table":
        inputs.indices = hints(inputs)["block_tables"]
    if kind == "upper bounds":
        more = bounds_of(inputs)
    arguments, options = runner.plan_arguments(inputs)
    if kind == "decode":
        wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace(), backend="cpu")
        arguments = arguments[1:]  # without qo_indptr
        return functools.partial(fast_decode_plan, wrapper, *arguments, q_data_type=case.dtype)
    for_graphs = graph_options(inputs) if kind == "graphs" else {}
    wrapper = runner.make_wrapper(case, backend="cpu", **for_graphs)
    method = wrapper.begin_forward if kind == "begin_forward" else wrapper.plan
    return functools.partial(method, *arguments, **options, **more)


@pytest.mark.parametrize(
    "kind",
    ["paged", "ragged", "block table", "upper bounds", "begin_forward", "graphs", "decode"],
)
def test_a_repeated_plan_is_made_in_cpp(kind):
    repeated = set()
    for scale in SCALES:
        plan = plan_of(kind, scale)
        first, _, third = (interpreter_steps(plan) for _ in range(3))
        assert third < first / 4
        repeated.add(third)
    assert len(repeated) == 1


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


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
@pytest.mark.parametrize("call", ["run", "run into out", "forward", "skip tiles"])
@pytest.mark.parametrize("target", ["cpu"], indirect=True)
def test_a_repeated_run_is_made_in_cpp(target, case, call):
    """The options of forward(), which differ from plan()'s, are checked once for each plan; a
    factor by which tiles are left out is no other plan."""
    repeated = set()
    for scale in SCALES:
        inputs, wrapper = unplanned(scaled(case, scale), target)
        run = run_of(call, wrapper, inputs)
        for window_left in (-1, 9):
            runner.plan(wrapper, inputs, window_left=window_left)
            first, _, third = (interpreter_steps(run) for _ in range(3))
            assert third < first / 4
        repeated.add(third)
    assert len(repeated) == 1


@pytest.mark.parametrize("target", ["cpu"], indirect=True)
def test_the_oldest_of_many_forward_calls_is_forgotten(target):
    inputs, wrapper = planned(PAGED, target)

    def steps(sm_scale) -> int:
        return interpreter_steps(lambda: wrapper.forward(*tensors(inputs), sm_scale=sm_scale))

    first, again = steps(1.0), steps(1.0)
    assert again < first / 4
    for number in range(16):
        steps(2.0 + number)
    assert steps(1.0) > 4 * again
    assert steps(17.0) < 4 * again
