"""BatchAttentionWithAttentionSinkWrapper: sinks and sm_scale come with run(), by position."""

import dataclasses

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
HEAD_DIMS = {"head_dim_qk": 64, "head_dim_vo": 64}


def made(target, case=CASE, **options):
    inputs = build(case, device=target.device)
    dtypes = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
    wrapper = Wrapper(
        runner.workspace(target.device), "NHD", backend="auto", **{**dtypes, **HEAD_DIMS, **options}
    )
    return inputs, wrapper


@pytest.mark.parametrize("split", [None, 32])
@pytest.mark.parametrize("window", [-1, 20])
def test_run(target, window, split):
    inputs, wrapper = made(target, window_left=window)
    runner.plan(wrapper, inputs, window_left=window, sm_scale=9.0, fixed_split_size=split)
    out, lse = wrapper.run(inputs.q, inputs.cache, inputs.sinks, 0.2, v_scale=0.5, return_lse=True)
    pipeline = Pipeline(0.2, True, window, out_scale=0.5, sinks=inputs.sinks)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()


def test_scale_of_the_plan_where_run_has_none(target):
    inputs, wrapper = made(target)
    runner.plan(wrapper, inputs, sm_scale=0.3)
    pipeline = Pipeline(0.3, True, sinks=inputs.sinks)
    for result in (
        wrapper.run(inputs.q, inputs.cache, inputs.sinks, return_lse=True),
        wrapper.run_return_lse(inputs.q, inputs.cache, sinks=inputs.sinks),
    ):
        compare(*result, reference(inputs, pipeline=pipeline)).check()


def test_without_sinks(target):
    inputs, wrapper = made(target)
    runner.plan(wrapper, inputs)
    out, lse = wrapper.run(inputs.q, inputs.cache, None, 0.2, return_lse=True)
    compare(out, lse, reference(inputs, pipeline=Pipeline(0.2, True))).check()


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


CONTRADICTIONS = {
    "q_data_type": {"q_data_type": torch.float16, "kv_data_type": torch.float16},
    "head_dim_qk": {"head_dim_qk": 128},
    "head_dim_vo": {"head_dim_vo": 128},
    "window_left": {"window_left": 30},
    "pos_encoding_mode": {"pos_encoding_mode": "ALIBI"},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_plan_that_contradicts_the_constructor(target, name):
    inputs, wrapper = made(target, **CONTRADICTIONS[name])
    with pytest.raises(ValueError, match=rf"{name}=.* contradicts the constructor's"):
        runner.plan(wrapper, inputs)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"q_data_type": torch.int8}, "q_data_type"),
        ({"window_left": -2}, "window_left"),
        ({"pos_encoding_mode": "YARN"}, "pos_encoding_mode"),
        ({"head_dim_qk": 0}, "head_dim_qk"),
        ({"use_fp16_qk_reduction": "no"}, "use_fp16_qk_reduction"),
    ],
)
def test_constructor_refusals(target, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        made(target, **options)


def test_run_refusals(target):
    inputs, wrapper = made(target)
    runner.plan(wrapper, inputs)
    with pytest.raises(TypeError, match="sinks"):
        wrapper.run(inputs.q, inputs.cache, inputs.sinks.half(), 0.2)
    with pytest.raises(ValueError, match="sm_scale"):
        wrapper.run(inputs.q, inputs.cache, inputs.sinks, float("inf"))
    with pytest.raises(TypeError, match=r"run\(\) got"):
        wrapper.run(inputs.q, inputs.cache, inputs.sinks, 0.2, 1.0)
