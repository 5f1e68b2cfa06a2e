"""fp8: factors of heads, saturation, and refusals. Random problems have everything else."""

import dataclasses

import pytest
import torch
from planned_cases import check_run, planned
from preflash.testing import Case, MaskKind, reference, runner
from refusals import refused

HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64, mask=MaskKind.CAUSAL)


def with_dtypes(q, kv=None, out=None, **changes) -> Case:
    return dataclasses.replace(RAGGED, dtype=q, kv_dtype=kv, o_dtype=out, **changes)


@pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
def test_factors_of_one_tensor_alone(target, name):
    inputs, wrapper = planned(with_dtypes(E4M3, head_scales=True), target)
    factors = getattr(inputs.scales, name[-1])
    none = dict.fromkeys(("scale_q", "scale_k", "scale_v"))
    out, lse = runner.run(wrapper, inputs, **{**none, name: factors})
    inputs.scales = dataclasses.replace(type(inputs.scales)(), **{name[-1]: factors})
    runner.compare(inputs, out, lse).check()


def test_too_large_for_e4m3(target):
    """The format has no infinity: 448 stands for all larger numbers."""
    inputs, wrapper = planned(with_dtypes(E4M3, None, E4M3), target)
    pipeline = dataclasses.replace(inputs.pipeline, out_scale=3000.0)
    out, _ = check_run(inputs, wrapper, reference(inputs, pipeline=pipeline), v_scale=3000.0)
    assert (out.float().abs() == 448).any()
    assert not out.float().isnan().any()


def test_factors_are_checked_for_the_queries_of_each_plan(target):
    """Queries of e5m2 become float16: the two plans differ in nothing else."""
    inputs, wrapper = planned(with_dtypes(HALF, E5M2), target)
    factors = torch.full((4,), 0.5, device=target.device)
    for q_dtype in (HALF, E5M2, HALF):
        runner.plan(wrapper, inputs, q_data_type=q_dtype, o_data_type=HALF)
        tensors = (inputs.q.to(q_dtype), inputs.k, inputs.v)
        if q_dtype is HALF:
            refused("scale_q: only an fp8 tensor", wrapper.run, *tensors, scale_q=factors)
        else:
            given = wrapper.run(*tensors, scale_q=factors)
            torch.testing.assert_close(given, wrapper.run(*tensors, q_scale=0.5))


# Dtypes of q, of k and v, and of the output that plan() refuses.
REFUSED = [
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


def test_plan_refuses(target):
    inputs, wrapper = planned(with_dtypes(HALF, page_size=16), target)
    before = wrapper.run(inputs.q, inputs.cache)
    for *dtypes, error, says in REFUSED:
        names = ("q_data_type", "kv_data_type", "o_data_type")
        wrong = dict(zip(names, dtypes, strict=True))
        refused(says, runner.plan, wrapper, inputs, error=error, **wrong)
        assert torch.equal(wrapper.run(inputs.q, inputs.cache), before)
