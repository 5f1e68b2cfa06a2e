"""plan() and run() are on the critical path of every step: a repeated call is made in C++, and
how many bytecodes Python executes for it does not depend on the batch."""

import dataclasses
import functools
import itertools

import pytest
import torch
from graph_stage import Limits, Stage
from interpreter_steps import interpreter_steps
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner
from wrapper_options import hints

PAGED = Case("paged", (3, 0, 9), (40, 0, 64), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
DECODE = dataclasses.replace(PAGED, name="decode", qo_lens=(1, 1, 1), mask=MaskKind.NONE)


def long(case: Case) -> Case:
    return dataclasses.replace(case, qo_lens=case.qo_lens * 60, kv_lens=case.kv_lens * 60)


def prefill_plan(case: Case, method="plan", *, as_table=False, bounds=False):
    inputs = build(case)
    options = {}
    if as_table:
        inputs = dataclasses.replace(inputs, indices=hints(inputs)["block_tables"])
    if bounds:
        lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        options = {"seq_lens": lens, "lengths_are_upper_bounds": True}
    wrapper = runner.make_wrapper(case, backend="cpu")
    arguments, known = runner.plan_arguments(inputs)
    return functools.partial(getattr(wrapper, method), *arguments, **known, **options)


def graph_plan(case: Case, target):
    limits = Limits(case.batch_size, rows=1000, pages=1000)
    stage = Stage(case, limits, target)
    arguments, options = runner.plan_arguments(stage.make(case.qo_lens, case.kv_lens))
    return functools.partial(stage.wrapper.plan, *arguments, **options)


def decode_plan(case: Case):
    inputs = build(case)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace(), backend="cpu")
    arrays = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    return functools.partial(
        fast_decode_plan, wrapper, *arrays, 4, 2, 64, 16, q_data_type=case.dtype
    )


PLANS = {
    "paged": lambda to, size: prefill_plan(size(PAGED)),
    "ragged": lambda to, size: prefill_plan(size(RAGGED)),
    "block table": lambda to, size: prefill_plan(size(PAGED), as_table=True),
    "upper bounds": lambda to, size: prefill_plan(size(PAGED), bounds=True),
    "begin_forward": lambda to, size: prefill_plan(size(PAGED), "begin_forward"),
    "graphs": lambda to, size: graph_plan(size(PAGED), to),
    "decode": lambda to, size: decode_plan(size(DECODE)),
}
on_the_cpu = pytest.mark.parametrize("target", ["cpu"], indirect=True)


@on_the_cpu
@pytest.mark.parametrize("kind", PLANS)
def test_a_repeated_plan_is_made_in_cpp(target, kind):
    repeated = []
    for size in (lambda case: case, long):
        plan = PLANS[kind](target, size)
        first, _, third = (interpreter_steps(plan) for _ in range(3))
        assert third < first / 4
        repeated.append(third)
    assert repeated[0] == repeated[1]


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
@pytest.mark.parametrize("call", ["run", "run into out", "forward", "skip tiles"])
def test_a_repeated_run_is_made_in_cpp(case, call):
    """The options of forward(), which differ from plan()'s, are checked once for each plan; a
    factor by which tiles are left out is no other plan."""
    repeated = []
    for inputs in (build(case), build(long(case))):
        wrapper = runner.make_wrapper(case, backend="cpu")
        tensors = (inputs.q, inputs.cache) if case.paged else (inputs.q, inputs.k, inputs.v)
        options = {"out": torch.empty_like(inputs.q)} if call == "run into out" else {}
        run = functools.partial(wrapper.run, *tensors, **options)
        if call == "forward":
            run = functools.partial(wrapper.forward, *tensors, sm_scale=0.3)
        elif call == "skip tiles":
            factors = itertools.count(1)

            def run(given=tensors, run=wrapper.run, factors=factors):
                run(*given, skip_softmax_threshold_scale_factor=next(factors))

        for window_left in (-1, 9):
            runner.plan(wrapper, inputs, window_left=window_left)
            first, _, third = (interpreter_steps(run) for _ in range(3))
            assert third < first / 4
        repeated.append(third)
    assert repeated[0] == repeated[1]
