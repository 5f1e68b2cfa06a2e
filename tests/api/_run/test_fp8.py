"""fp8: factors of tensors and of heads, saturation, and refusals. test_cases.py has the cases."""

import dataclasses

import pytest
import torch
from dims_and_singles import SINGLE
from planned_cases import planned
from preflash.testing import Case, MaskKind, build, reference, runner
from test_cases import DTYPES

HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAGED = Case("paged", (9, 3), (30, 5), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
both_cases = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)


def with_dtypes(case: Case, q, kv=None, out=None, **changes) -> Case:
    return dataclasses.replace(case, dtype=q, kv_dtype=kv, o_dtype=out, **changes)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("as_tensors", [False, True])
@both_cases
def test_one_factor_for_a_tensor(target, case, dtypes, as_tensors):
    """q_scale and k_scale multiply the logits and v_scale the output, with factors of heads too."""
    for head_scales in (False, True):
        case = with_dtypes(case, *dtypes, head_scales=head_scales)
        inputs, wrapper = planned(case, target)
        factors = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": -0.25}
        if as_tensors:
            factors = {n: torch.tensor([x], device=target.device) for n, x in factors.items()}
        out, lse = runner.run(wrapper, inputs, **factors)
        pipeline = dataclasses.replace(inputs.pipeline, sm_scale=case.scale * 1.5, out_scale=-0.25)
        runner.compare(inputs, out, lse, reference(inputs, pipeline=pipeline)).check()


@pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
def test_factors_of_one_tensor_alone(target, name):
    inputs, wrapper = planned(with_dtypes(RAGGED, E4M3, head_scales=True), target)
    factors = getattr(inputs.scales, name[-1])
    none = dict.fromkeys(("scale_q", "scale_k", "scale_v"))
    out, lse = runner.run(wrapper, inputs, **{**none, name: factors})
    inputs.scales = dataclasses.replace(type(inputs.scales)(), **{name[-1]: factors})
    runner.compare(inputs, out, lse).check()


def test_too_large_for_e4m3(target):
    """The format has no infinity: 448 stands for all larger numbers."""
    inputs, wrapper = planned(with_dtypes(RAGGED, E4M3, None, E4M3), target)
    out, lse = runner.run(wrapper, inputs, v_scale=3000.0)
    pipeline = dataclasses.replace(inputs.pipeline, out_scale=3000.0)
    runner.compare(inputs, out, lse, reference(inputs, pipeline=pipeline)).check()
    assert (out.float().abs() == 448).any()
    assert not out.float().isnan().any()


def test_planned_by_name(target):
    inputs, wrapper = planned(
        with_dtypes(PAGED, HALF, E4M3), target, q_data_type="float16", kv_data_type="float8_e4m3fn"
    )
    assert ("_kve4m3_" if target.device == "cpu" else "_converted") in wrapper.variant
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_single_plans_are_kept_apart(target):
    """Requests that differ in the dtype of their keys alone."""
    for kv in (None, E4M3, E5M2, None, E4M3):
        inputs = build(with_dtypes(SINGLE[0], BFLOAT, kv), device=target.device)
        runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


def test_factors_are_checked_for_the_queries_of_each_plan(target):
    """Queries of e5m2 become float16: the two plans differ in nothing else."""
    inputs, wrapper = planned(with_dtypes(RAGGED, HALF, E5M2), target)
    factors = torch.full((4,), 0.5, device=target.device)
    for q_dtype in (HALF, E5M2, HALF):
        runner.plan(wrapper, inputs, q_data_type=q_dtype, o_data_type=HALF)
        tensors = (inputs.q.to(q_dtype), inputs.k, inputs.v)
        if q_dtype is HALF:
            with pytest.raises(ValueError, match="scale_q: only an fp8 tensor"):
                wrapper.run(*tensors, scale_q=factors)
        else:
            given = wrapper.run(*tensors, scale_q=factors)
            torch.testing.assert_close(given, wrapper.run(*tensors, q_scale=0.5))


# --- Refusals ----------------------------------------------------------------

# plan(): dtypes of q, of k and v, and of the output
PLAN = [
    (E5M2, HALF, None, TypeError, "must be 8-bit"),
    (E5M2, None, E4M3, NotImplementedError, "o_data_type=.*e4m3fn: for float8_e5m2 queries"),
    (torch.float8_e4m3fnuz, HALF, None, TypeError, "q_data_type=.*e4m3fnuz: must"),
    (E4M3, HALF, None, TypeError, "kv_data_type=.*float16"),
    (E4M3, E5M2, None, TypeError, "kv_data_type=.*e5m2"),
    (HALF, BFLOAT, None, TypeError, "kv_data_type=torch.bfloat16: must be q's"),
    (HALF, "fp8_e4m4", None, ValueError, "kv_data_type='fp8_e4m4': not the name"),
    (HALF, HALF, E4M3, NotImplementedError, "o_data_type=torch.float8_e4m3fn"),
    (E4M3, None, torch.float32, NotImplementedError, "o_data_type=torch.float32"),
    (E4M3, None, E5M2, NotImplementedError, "o_data_type=torch.float8_e5m2"),
]


@pytest.mark.parametrize(("q", "kv", "out", "error", "why"), PLAN)
def test_plan_refuses(target, q, kv, out, error, why):
    inputs, wrapper = planned(dataclasses.replace(PAGED, dtype=HALF), target)
    with pytest.raises(error, match=why):
        runner.plan(wrapper, inputs, q_data_type=q, kv_data_type=kv, o_data_type=out)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
