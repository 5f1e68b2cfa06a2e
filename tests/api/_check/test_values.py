"""Numbers that float32 or the kernels cannot hold are refused by name, in short messages; those at
the limits compute."""

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace

import preflash
import pytest
import torch
from planned_cases import check_run, planned, unplanned
from preflash.testing import Case, MaskKind, reference, runner
from preflash.testing.case import Position

HUGE = 10**400
CASE = Case("values", (40,), (200,), 2, 1, 64, mask=MaskKind.CAUSAL)
ALIBI = dataclasses.replace(CASE, position=Position.ALIBI)
SMALLEST_BIASED_SCALE, LARGEST_LOGITS_SCALE, LARGEST_SOFT_CAP = 1e-30, 2.358e38, 1e30
SCALES = ("q_scale", "k_scale", "v_scale")
NO_DTYPES = ["fp8", "8", "BF16", "tensor", "torch", "", "e4m3 "]

INTEGERS = (HUGE, -HUGE, 10**5000)
NO_SCALES = (
    (ValueError, torch.ones(1, device="meta")), (ValueError, torch.full((), math.nan)),
    (TypeError, torch.ones(1).to_sparse()), (TypeError, torch.ones(1, dtype=torch.bool)),
    (TypeError, torch.nested.nested_tensor([torch.ones(1)])), (TypeError, torch.ones(1).cfloat()),
)  # fmt: skip
# Values of an option of plan(), or of options, with what the ValueError says.
OF_PLAN = [
    *((name, (*INTEGERS, Fraction(HUGE, 3)), name) for name in ("sm_scale", "logits_soft_cap")),
    *((name, INTEGERS, name) for name in ("window_left", "fixed_split_size", "head_dim_vo")),
    ("sm_scale", (2.36e38, -2.36e38, math.inf, math.nan), "sm_scale"),
    ("logits_soft_cap", (1.01e30, 3e38), "logits_soft_cap"),
    ("uniform_q_len", (39, 41), "uniform_q_len.*request 0 has 40"),
    ("window_left", (2**31,), "window_left=2147483648: must be in"),
    ("q_data_type", NO_DTYPES, "q_data_type.*float16.*bf16"),
]
# Options of plan(), options of run(), and the error with what it says.
REFUSED = [
    *(({name: value}, {}, ValueError, says) for name, values, says in OF_PLAN for value in values),
    *(({}, {name: value}, ValueError, name)
      for value in (*INTEGERS, Fraction(HUGE, 3)) for name in SCALES),
    *(({}, {"k_scale": value}, error, "k_scale") for error, value in NO_SCALES),
    ({"sm_scale": 1.2e38}, {"q_scale": 2.0}, ValueError, "q_scale"),
    ({"sm_scale": 1e33, "logits_soft_cap": 1e-6}, {}, ValueError, "sm_scale.*logits_soft_cap"),
    *(({"sm_scale": value, "pos_encoding_mode": "ALIBI"}, {}, ValueError, "sm_scale.*ALiBi")
      for value in (1e-38, 9e-31, -9e-31)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "run", "error", "says"),
    [pytest.param(*row, id=f"{','.join(row[0] | row[1])} {at}") for at, row in enumerate(REFUSED)],
)
def test_refusals(target, plan, run, error, says):
    inputs, wrapper = unplanned(CASE, target)

    def plan_and_run():
        runner.plan(wrapper, inputs, **plan)
        wrapper.run(inputs.q, inputs.k, inputs.v, **run)

    with pytest.raises(error, match=rf"(?s)\b{says}\b") as caught:
        plan_and_run()
    assert wrapper.variant if run else wrapper.variant is None
    assert len(str(caught.value)) < 400
    assert "0" * 30 not in str(caught.value)


@pytest.mark.parametrize("sm_scale", [LARGEST_LOGITS_SCALE, -LARGEST_LOGITS_SCALE, 2.3e38, 0.0])
def test_large_scales(target, sm_scale):
    """Times log2(e) the largest is finite in float32, and hardly less than the largest that is."""
    inputs, wrapper = planned(CASE, target, sm_scale=sm_scale)
    assert not wrapper.run(torch.zeros_like(inputs.q), inputs.k, inputs.v).isnan().any()


@pytest.mark.parametrize("sm_scale", [SMALLEST_BIASED_SCALE, -SMALLEST_BIASED_SCALE, 0.0])
def test_scales_and_alibi(target, sm_scale):
    """Biases are added before the scale: one divided by the smallest scale is finite."""
    inputs, wrapper = planned(ALIBI, target, sm_scale=sm_scale)
    assert all(result.isfinite().all() for result in runner.run(wrapper, inputs))


def test_a_scale_and_a_soft_cap():
    q = k = v = torch.ones(2, 1, 64)
    out = preflash.single_prefill_with_kv_cache(q, k, v, sm_scale=1e30, logits_soft_cap=1.0)
    assert out.isfinite().all()


@pytest.mark.parametrize("sm_scale", [0.125, 1e-3, 2e-8])
@pytest.mark.parametrize("soft_cap", [1e10, 1e20, LARGEST_SOFT_CAP])
def test_large_soft_caps(target, sm_scale, soft_cap):
    """A large cap is as accurate as no cap, which is what it means."""
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


@pytest.mark.parametrize("uniform", [5, -1])
def test_uniform_q_len(target, uniform):
    check_run(
        *planned(Case("uniform", (5,) * 3, (9,) * 3, 4, 2, 64), target, uniform_q_len=uniform)
    )


@pytest.mark.parametrize("widest", [2**31 - 1, 2**30])
def test_a_window_wider_than_any_request(target, widest):
    """Callers write the largest int32 where others write -1."""
    case = Case("wide", (9, 40), (70, 40), 4, 2, 64, mask=MaskKind.CAUSAL)
    inputs, wrapper = planned(case, target, window_left=widest)
    check_run(inputs, wrapper)
    check_run(inputs, wrapper, window_left=widest)


# Names of dtypes.

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
        *((one, one, one) for one in (F16, BF16)),
        *((BF16, E4M3, BF16), (F16, E5M2, F16), (E4M3, E4M3, F16)),
    ],
    ids=lambda dtype: dtype[1].split()[0],
)
def test_dtypes_by_name(target, q, kv, out):
    """run() refuses tensors of another dtype than the plan's, so every name means its dtype."""
    check_names(target, q, kv, out)


def test_float32_by_name():
    check_names(SimpleNamespace(device="cpu", backend="cpu"), F32, F32, F32)


def check_names(target, q, kv, out):
    dtypes = {"dtype": q[0], "kv_dtype": kv[0], "o_dtype": out[0]}
    inputs, wrapper = planned(dataclasses.replace(CASE, **dtypes), target)
    variant, expected = wrapper.variant, runner.run(wrapper, inputs)
    runner.compare(inputs, *expected).check()
    names = [dtype[1].split() for dtype in (q, kv, out)]
    for i in range(max(map(len, names))):
        each = [name[min(i, len(name) - 1)] for name in names]
        options = dict(zip(("q_data_type", "kv_data_type", "o_data_type"), each, strict=True))
        runner.plan(wrapper, inputs, **options)
        assert wrapper.variant == variant
        result = wrapper.run(inputs.q, inputs.k, inputs.v)
        assert result.dtype is out[0]
        assert torch.equal(result.float(), expected[0].float())


def test_functions_take_names_of_dtypes():
    q = k = v = torch.randn(3, 2, 64).to(torch.float8_e4m3fn)
    for dtype, names in (BF16, F16, E4M3):
        for name in names.split():
            assert preflash.single_prefill_with_kv_cache(q, k, v, o_dtype=name).dtype is dtype
