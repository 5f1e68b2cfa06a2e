"""Numbers at the limits of float32 and of the kernels compute, and so do names of dtypes."""

import dataclasses
import itertools

import preflash
import pytest
import torch
from planned_cases import check_run, planned, unplanned
from preflash.testing import Case, MaskKind, reference, runner
from preflash.testing.case import Position

CASE = Case("values", (40,), (200,), 2, 1, 64, mask=MaskKind.CAUSAL)
ALIBI = dataclasses.replace(CASE, position=Position.ALIBI)
SMALLEST_BIASED_SCALE, LARGEST_LOGITS_SCALE, LARGEST_SOFT_CAP = 1e-30, 2.358e38, 1e30
# Options of plan(), options of run(), and what the ValueError says.
TOGETHER = [
    ({"sm_scale": 1.2e38}, {"q_scale": 2.0}, "q_scale"),
    ({"sm_scale": 1e33, "logits_soft_cap": 1e-6}, {}, "sm_scale.*logits_soft_cap"),
    *(({"sm_scale": value, "pos_encoding_mode": "ALIBI"}, {}, "sm_scale.*ALiBi")
      for value in (1e-38, 9e-31, -9e-31)),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "run", "says"), TOGETHER)
def test_values_that_do_not_go_together(target, plan, run, says):
    inputs, wrapper = unplanned(CASE, target)

    def plan_and_run():
        runner.plan(wrapper, inputs, **plan)
        wrapper.run(inputs.q, inputs.k, inputs.v, **run)

    with pytest.raises(ValueError, match=rf"(?s)\b{says}\b"):
        plan_and_run()
    assert (wrapper.variant is None) == (not run)


@pytest.mark.parametrize(
    ("case", "scales"),
    [
        (CASE, (LARGEST_LOGITS_SCALE, -LARGEST_LOGITS_SCALE, 2.3e38, 0.0)),
        (ALIBI, (SMALLEST_BIASED_SCALE, -SMALLEST_BIASED_SCALE, 0.0)),
    ],
    ids=["no bias", "ALiBi"],
)
def test_scales_at_the_limits(target, case, scales):
    """The largest is finite in float32 after a factor of log2(e). Biases are added before the
    scale, and one divided by the smallest scale is finite."""
    for sm_scale in scales:
        inputs, wrapper = planned(case, target, sm_scale=sm_scale)
        if case is CASE:
            inputs.q.zero_()
        assert all(result.isfinite().all() for result in runner.run(wrapper, inputs))


def test_a_scale_and_a_soft_cap():
    q = k = v = torch.ones(2, 1, 64)
    out = preflash.single_prefill_with_kv_cache(q, k, v, sm_scale=1e30, logits_soft_cap=1.0)
    assert out.isfinite().all()


@pytest.mark.parametrize("sm_scale", [0.125, 2e-8])
def test_large_soft_caps(target, sm_scale):
    """A large cap is as accurate as no cap, which is what it means."""
    for soft_cap in (1e10, LARGEST_SOFT_CAP):
        case = dataclasses.replace(CASE, sm_scale=sm_scale, soft_cap=soft_cap)
        if target.backend == "cpu":
            case = case.with_dtype(torch.float32)
        inputs, wrapper = planned(case, target)
        if sm_scale < 1e-6:
            inputs.q.mul_(0.1 / sm_scale)
        plain = reference(inputs, pipeline=dataclasses.replace(inputs.pipeline, soft_cap=0.0))
        out, lse = runner.run(wrapper, inputs)
        assert float((lse.double() - plain.lse).abs().max()) < 1e-4
        if target.backend == "cpu":
            assert float((out.double() - plain.out).abs().max()) < 1e-5


def test_a_window_wider_than_any_request(target):
    """Callers write the largest int32 where others write -1."""
    case = Case("wide", (9, 40), (70, 40), 4, 2, 64, mask=MaskKind.CAUSAL)
    for widest in (2**31 - 1, 2**30):
        inputs, wrapper = planned(case, target, window_left=widest)
        check_run(inputs, wrapper)
        check_run(inputs, wrapper, window_left=widest)


F16, BF16, F32, E4M3, E5M2 = (
    (torch.float16, "f16 fp16 float16 half torch.float16"),
    (torch.bfloat16, "bf16 bfloat16 torch.bfloat16"),
    (torch.float32, "f32 fp32 float32 float torch.float32"),
    (torch.float8_e4m3fn, "e4m3 fp8_e4m3 float8_e4m3fn"),
    (torch.float8_e5m2, "e5m2 fp8_e5m2 float8_e5m2"),
)


@pytest.mark.parametrize(
    ("q", "kv", "out"),
    [
        *((one, one, one) for one in (F16, BF16, F32)),
        *((BF16, E4M3, BF16), (F16, E5M2, F16), (E4M3, E4M3, F16)),
    ],
    ids=lambda dtype: dtype[1].split()[0],
)
def test_dtypes_by_name(target, q, kv, out):
    """run() refuses tensors of another dtype than the plan's, so every name means its dtype."""
    if q is F32 and target.backend != "cpu":
        pytest.skip("only the CPU computes in float32")
    dtypes = {"dtype": q[0], "kv_dtype": kv[0], "o_dtype": out[0]}
    inputs, wrapper = planned(dataclasses.replace(CASE, **dtypes), target)
    variant, expected = wrapper.variant, runner.run(wrapper, inputs)
    runner.compare(inputs, *expected).check()
    names = itertools.zip_longest(*(dtype[1].split() for dtype in (q, kv, out)))
    for each in names:
        options = zip(("q_data_type", "kv_data_type", "o_data_type"), each, strict=True)
        runner.plan(wrapper, inputs, **{option: name for option, name in options if name})
        assert wrapper.variant == variant
        result = wrapper.run(inputs.q, inputs.k, inputs.v)
        assert result.dtype is out[0]
        assert torch.equal(result.float(), expected[0].float())


def test_functions_take_names_of_dtypes():
    q = k = v = torch.randn(3, 2, 64).to(torch.float8_e4m3fn)
    for dtype, names in (BF16, F16, E4M3):
        for name, option in itertools.product(names.split(), ("o_dtype", "o_data_type")):
            out = preflash.single_prefill_with_kv_cache(q, k, v, **{option: name})
            assert out.dtype is dtype
