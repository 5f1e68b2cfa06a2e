"""BatchAttentionWithAttentionSinkWrapper takes sinks and sm_scale by position in run()."""

import dataclasses
import math

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, Sinks, build, compare, reference, runner
from preflash.testing.oracle import Pipeline

CASE = Case(
    "sinks", (9, 0, 33, 1), (40, 7, 90, 0), 8, 2, 64, page_size=16,
    mask=MaskKind.CAUSAL, sinks=Sinks.MIXED,
)  # fmt: skip
Wrapper = preflash.BatchAttentionWithAttentionSinkWrapper


def made(target, case=CASE, **options):
    inputs, work = build(case, device=target.device), runner.workspace(target.device)
    fixed = {"q_data_type": case.dtype, "kv_data_type": case.dtype_kv}
    fixed |= {"head_dim_qk": 64, "head_dim_vo": 64, **options}
    return inputs, Wrapper(work, "NHD", backend="auto", **fixed)


@pytest.mark.parametrize(("window", "split"), [(-1, None), (20, None), (20, 32)])
def test_run(target, window, split):
    """run() replaces the scale of the plan, and has sinks or none."""
    inputs, wrapper = made(target, window_left=window)
    runner.plan(wrapper, inputs, window_left=window, sm_scale=0.3, fixed_split_size=split)
    for sinks in (inputs.sinks, None):
        scaled = Pipeline(0.2, True, window, out_scale=0.5, sinks=sinks)
        of_plan = Pipeline(0.3, True, window, sinks=sinks)
        out, lse = wrapper.run(inputs.q, inputs.cache, sinks, 0.2, v_scale=0.5, return_lse=True)
        compare(out, lse, reference(inputs, pipeline=scaled)).check()
        for result in (
            wrapper.run(inputs.q, inputs.cache, sinks, return_lse=True),
            wrapper.run_return_lse(inputs.q, inputs.cache, sinks=sinks),
        ):
            compare(*result, reference(inputs, pipeline=of_plan)).check()


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_fp8(target, q_dtype):
    case = dataclasses.replace(CASE, dtype=q_dtype, kv_dtype=torch.float8_e4m3fn, head_scales=True)
    inputs, wrapper = made(target, case, kv_data_type="float8_e4m3fn")
    runner.plan(wrapper, inputs)
    scales = {"scale_q": inputs.scales.q, "scale_k": inputs.scales.k, "scale_v": inputs.scales.v}
    out, lse = wrapper.run(inputs.q, inputs.cache, inputs.sinks, 0.2, return_lse=True, **scales)
    inputs.variant = wrapper.variant
    pipeline = dataclasses.replace(inputs.pipeline, sm_scale=0.2)
    runner.compare(inputs, out, lse, reference(inputs, pipeline=pipeline)).check()


def test_defaults_are_bfloat16_and_128(target):
    case = dataclasses.replace(CASE, head_dim=128)
    inputs = build(case, device=target.device)
    wrapper = Wrapper(runner.workspace(target.device))
    runner.plan(wrapper, inputs)
    result = wrapper.run(inputs.q, inputs.cache, inputs.sinks, case.scale, return_lse=True)
    runner.compare(inputs, *result).check()


# Options of the constructor, arguments of run() after q and the cache, and the refusal.
REFUSED = [
    *((options, (), ValueError, f"{next(iter(options))}=.* contradicts the constructor's")
      for options in (
        {"q_data_type": torch.float16, "kv_data_type": torch.float16}, {"head_dim_qk": 128},
        {"head_dim_vo": 128}, {"window_left": 30}, {"pos_encoding_mode": "ALIBI"},
    )),
    *(({name: value}, (), (TypeError, ValueError), name) for name, value in (
        ("q_data_type", torch.int8), ("window_left", -2), ("pos_encoding_mode", "YARN"),
        ("head_dim_qk", 0), ("use_fp16_qk_reduction", "no"),
    )),
    ({}, (torch.zeros(8).half(), 0.2), TypeError, "sinks"),
    ({}, (None, math.inf), ValueError, "sm_scale"),
    ({}, (None, 0.2, 1.0), TypeError, r"run\(\) got"),
]  # fmt: skip


def test_refusals(target):
    def plan_and_run(options, wrong):
        inputs, wrapper = made(target, **options)
        runner.plan(wrapper, inputs)
        wrapper.run(inputs.q, inputs.cache, *wrong)

    for options, wrong, error, says in REFUSED:
        with pytest.raises(error, match=says):
            plan_and_run(options, wrong)
