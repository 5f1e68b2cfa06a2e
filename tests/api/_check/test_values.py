"""Numbers that float32 or the kernels cannot hold are refused by name, in short messages."""

import dataclasses
from fractions import Fraction

import preflash
import pytest
import torch
from preflash._check import validate
from preflash.testing import Case, MaskKind, build, reference, runner
from preflash.testing.case import Position

HUGE = 10**400
CASE = Case("values", (40,), (200,), 2, 1, 64, mask=MaskKind.CAUSAL)


def refusal(call, name, error=ValueError):
    with pytest.raises(error, match=rf"\b{name}\b") as caught:
        call()
    assert len(str(caught.value)) < 400
    assert "0" * 30 not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [HUGE, -HUGE, 10**5000, Fraction(HUGE, 3)], ids=lambda _: "huge")
def test_huge_numbers(value):
    refusal(lambda: validate.real("sm_scale", value), "sm_scale")
    refusal(lambda: validate.scale("q_scale", value), "q_scale")
    refusal(lambda: validate.soft_cap("logits_soft_cap", value), "logits_soft_cap")
    if isinstance(value, int):
        refusal(lambda: validate.size("head_dim", value), "head_dim")


def test_huge_numbers_in_plan(target):
    inputs = build(CASE, device=target.device)
    wrapper = runner.make_wrapper(CASE, backend=target.backend, device=target.device)
    for name in ("sm_scale", "logits_soft_cap", "window_left", "fixed_split_size"):
        refusal(lambda name=name: runner.plan(wrapper, inputs, **{name: HUGE}), name)
    runner.plan(wrapper, inputs)
    for name in ("q_scale", "k_scale", "v_scale"):
        call = lambda name=name: wrapper.run(inputs.q, inputs.k, inputs.v, **{name: HUGE})  # noqa: E731
        refusal(call, name)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.ones(1, device="meta"), ValueError),
        (torch.ones(1).to_sparse(), TypeError),
        (torch.nested.nested_tensor([torch.ones(1)]), TypeError),
        (torch.ones(1, dtype=torch.complex64), TypeError),
        (torch.ones(1, dtype=torch.bool), TypeError),
        (torch.full((), float("nan")), ValueError),
    ],
    ids=["meta", "sparse", "nested", "complex", "bool", "nan"],
)
def test_tensors_as_scales(value, error):
    refusal(lambda: validate.scale("k_scale", value), "k_scale", error)


def test_the_largest_logits_scale():
    """Times log2(e) it is finite in float32, and hardly less than the largest that is."""
    log2_e = torch.tensor(1.4426950408889634, dtype=torch.float32, device="cpu")
    limit = torch.tensor(validate.LARGEST_LOGITS_SCALE, dtype=torch.float32, device="cpu")
    assert bool((limit * log2_e).isfinite())
    assert bool((limit * 1.001 * log2_e).isinf())
    for value in (validate.LARGEST_LOGITS_SCALE, -validate.LARGEST_LOGITS_SCALE, 0.0):
        assert validate.logits_scale("sm_scale", value) == value
    for value in (2.36e38, -2.36e38, float("inf"), float("nan")):
        refusal(lambda value=value: validate.logits_scale("sm_scale", value), "sm_scale")


def test_scales_beside_a_soft_cap():
    q = k = v = torch.ones(2, 1, 64, device="cpu")
    single = preflash.single_prefill_with_kv_cache
    assert single(q, k, v, sm_scale=1e30, logits_soft_cap=1.0).isfinite().all()
    message = refusal(lambda: single(q, k, v, sm_scale=1e33, logits_soft_cap=1e-6), "sm_scale")
    assert "logits_soft_cap" in message


@pytest.mark.parametrize("sign", [1, -1])
def test_scales_beside_alibi(target, sign):
    """Biases are added before the scale: one divided by the smallest scale is finite."""
    case = dataclasses.replace(CASE, position=Position.ALIBI)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for value in (1e-38, 9e-31):
        message = refusal(
            lambda value=value: runner.plan(wrapper, inputs, sm_scale=sign * value), "sm_scale"
        )
        assert "ALiBi" in message
    for value in (validate.SMALLEST_BIASED_SCALE, 0.0):
        runner.plan(wrapper, inputs, sm_scale=sign * value)
        out, lse = runner.run(wrapper, inputs)
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_sm_scale(target):
    inputs = build(CASE, device=target.device)
    wrapper = runner.make_wrapper(CASE, backend=target.backend, device=target.device)
    for value in (2.37e38, -3.4e38):
        refusal(lambda value=value: runner.plan(wrapper, inputs, sm_scale=value), "sm_scale")
    runner.plan(wrapper, inputs, sm_scale=2.3e38)
    assert not wrapper.run(torch.zeros_like(inputs.q), inputs.k, inputs.v).isnan().any()


def test_sm_scale_with_calibration_scales(target):
    inputs = build(CASE, device=target.device)
    wrapper = runner.make_wrapper(CASE, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, sm_scale=1.2e38)
    refusal(lambda: wrapper.run(inputs.q, inputs.k, inputs.v, q_scale=2.0), "q_scale")


def test_soft_caps_that_are_too_large(target):
    inputs = build(CASE, device=target.device)
    wrapper = runner.make_wrapper(CASE, backend=target.backend, device=target.device)
    for value in (1.01e30, 1e38, 3e38):
        call = lambda value=value: runner.plan(wrapper, inputs, logits_soft_cap=value)  # noqa: E731
        refusal(call, "logits_soft_cap")
    for value in (1e38,):
        call = lambda value=value: preflash.single_prefill_with_kv_cache(  # noqa: E731
            inputs.q, inputs.k, inputs.v, logits_soft_cap=value, backend=target.backend
        )
        refusal(call, "logits_soft_cap")


@pytest.mark.parametrize("sm_scale", [0.125, 1e-3, 2e-8])
@pytest.mark.parametrize("soft_cap", [1e10, 1e20, validate.LARGEST_SOFT_CAP])
def test_large_soft_caps(target, sm_scale, soft_cap):
    """They are as accurate as no cap, which is what they mean."""
    case = dataclasses.replace(CASE, sm_scale=sm_scale, soft_cap=soft_cap)
    if target.backend == "cpu":
        case = case.with_dtype(torch.float32)
    inputs = build(case, device=target.device)
    if sm_scale < 1e-6:
        inputs.q.mul_(0.1 / sm_scale)
    plain = reference(inputs, pipeline=dataclasses.replace(inputs.pipeline, soft_cap=0.0))
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs)
    assert float((lse.double() - plain.lse).abs().max()) < 1e-4
    if target.backend == "cpu":
        assert float((out.double() - plain.out).abs().max()) < 1e-5


@pytest.mark.parametrize(("uniform", "accepted"), [(5, True), (-1, True), (4, False), (6, False)])
def test_uniform_q_len(target, uniform, accepted):
    case = Case("uniform", (5, 5, 5), (9, 9, 9), 4, 2, 64)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    plan = lambda: runner.plan(wrapper, inputs, uniform_q_len=uniform)  # noqa: E731
    if accepted:
        plan()
    else:
        assert "request 0 has 5" in refusal(plan, "uniform_q_len")


def test_a_window_wider_than_any_request(target):
    """Callers write the largest int32 where others write -1."""
    case = Case("wide", (9, 40), (70, 40), 4, 2, 64, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for widest in (2**31 - 1, 2**30):
        runner.plan(wrapper, inputs, window_left=widest)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
        runner.compare(inputs, *runner.run(wrapper, inputs, window_left=widest)).check()
    with pytest.raises(ValueError, match="window_left=2147483648: must be in"):
        runner.plan(wrapper, inputs, window_left=2**31)


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("f16 fp16 float16 half torch.float16", torch.float16),
        ("bf16 bfloat16 torch.bfloat16", torch.bfloat16),
        ("f32 fp32 float32 float torch.float32", torch.float32),
        ("e4m3 fp8_e4m3 float8_e4m3fn", torch.float8_e4m3fn),
        ("e5m2 fp8_e5m2 float8_e5m2", torch.float8_e5m2),
    ],
)
def test_dtypes_by_name(names, dtype):
    for name in (dtype, *names.split()):
        assert validate.dtype("q_data_type", name) is dtype


@pytest.mark.parametrize("name", ["fp8", "8", "BF16", "tensor", "torch", "", "e4m3 "])
def test_names_of_no_dtype(name):
    message = refusal(lambda: validate.dtype("q_data_type", name), "q_data_type")
    assert "float16" in message
    assert "bf16" in message


@pytest.mark.parametrize(
    ("q", "kv", "out"),
    [("bf16", "e4m3", "bf16"), ("f16", "e5m2", "fp16"), ("e4m3", "fp8_e4m3", "f16")],
)
def test_plan_takes_short_names(target, q, kv, out):
    """The numbers are those of a plan with torch's dtypes, and the oracle's."""
    dtype, kv_dtype, o_dtype = (validate.dtype("dtype", name) for name in (q, kv, out))
    case = dataclasses.replace(CASE, dtype=dtype, kv_dtype=kv_dtype, o_dtype=o_dtype)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    long, _ = runner.run(wrapper, inputs)
    variant = wrapper.variant
    runner.plan(wrapper, inputs, q_data_type=q, kv_data_type=kv, o_data_type=out)
    results = runner.run(wrapper, inputs)
    assert wrapper.variant == variant
    assert results[0].dtype is o_dtype
    assert torch.equal(results[0].float(), long.float())
    runner.compare(inputs, *results).check()


def test_functions_take_short_names():
    q = k = v = torch.randn(3, 2, 64).to(torch.float8_e4m3fn)
    for name in ("bf16", "fp16", "e4m3"):
        out = preflash.single_prefill_with_kv_cache(q, k, v, o_dtype=name)
        assert out.dtype is validate.dtype("o_dtype", name)
