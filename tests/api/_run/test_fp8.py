"""fp8: 16-bit queries over 8-bit keys and values, 8-bit queries, and their factors."""

import dataclasses
import itertools

import pytest
import torch
from dims_and_singles import DIMS, SINGLE, check_single
from preflash.testing import Case, KvForm, MaskKind, Position, Sinks, build, reference, runner

CAUSAL = MaskKind.CAUSAL
HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# dtypes of q, of k and v, and of the output where it is asked for
DTYPES = {
    "f16_e4m3": (HALF, E4M3, None),
    "f16_e5m2": (HALF, E5M2, None),
    "bf16_e4m3": (BFLOAT, E4M3, None),
    "bf16_e5m2": (BFLOAT, E5M2, None),
    "e4m3": (E4M3, None, None),
    "e4m3_to_bf16": (E4M3, E4M3, BFLOAT),
    "e4m3_to_f16": (E4M3, None, HALF),
    "e4m3_to_e4m3": (E4M3, None, E4M3),
}
every_dtype = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)


def with_dtypes(case: Case, dtypes, **changes) -> Case:
    q, kv, out = dtypes
    return dataclasses.replace(case, dtype=q, kv_dtype=kv, o_dtype=out, **changes)


def grid():
    """Dtypes x dims; masks, storage, layout, soft cap and factors take turns."""
    turns = itertools.cycle(
        itertools.product(
            (CAUSAL, MaskKind.NONE, MaskKind.PACKED),
            (0, 16, 5),
            ("NHD", "HND"),
            (KvForm.SEPARATE, KvForm.PADDED),
            (None, 15.0),
            (True, False),
        )
    )
    for dtypes, (dim, dim_vo) in itertools.product(DTYPES.values(), DIMS.items()):
        for _ in range(2):
            mask, page_size, layout, form, cap, scales = next(turns)
            case = Case("grid", (1, 70, 0, 33), (40, 131, 9, 33), 6, 2, dim, dim_vo)
            case = dataclasses.replace(case, page_size=page_size, layout=layout, form=form)
            yield with_dtypes(case, dtypes, mask=mask, soft_cap=cap, head_scales=scales)


@pytest.mark.parametrize("case", list(dict.fromkeys(grid())), ids=lambda case: case.id)
def test_batches(target, case):
    runner.check(build(case, device=target.device), backend=target.backend)


@every_dtype
@pytest.mark.parametrize("position", [Position.ALIBI, Position.ROPE], ids=lambda p: p.name)
def test_with_positions_and_sinks(target, dtypes, position):
    case = Case("position", (9, 66, 3), (77, 131, 0), 6, 2, 64, page_size=8, sinks=Sinks.MIXED)
    case = with_dtypes(case, dtypes, position=position, mask=CAUSAL, head_scales=True)
    runner.check(build(case, device=target.device), backend=target.backend)


@every_dtype
@pytest.mark.parametrize("split", [64, 1])
def test_split_keys(target, dtypes, split):
    case = Case("split", (1, 40, 0, 3), (700, 333, 5, 0), 8, 2, 128, page_size=16, mask=CAUSAL)
    case = with_dtypes(case, dtypes, fixed_split_size=split, head_scales=True)
    runner.check(build(case, device=target.device), backend=target.backend)


@every_dtype
@pytest.mark.parametrize(
    "lengths",
    [((0, 20, 5, 0, 0, 3), (40, 0, 9, 0, 7, 130)), ((0, 0), (0, 0)), ((150, 9), (64, 1))],
    ids=["some_zero", "all_empty", "longer_q"],
)
def test_lengths(target, dtypes, lengths):
    case = with_dtypes(Case("lengths", *lengths, 4, 2, 64, mask=CAUSAL), dtypes, head_scales=True)
    runner.check(build(case, device=target.device), backend=target.backend)


@every_dtype
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_single(target, case, dtypes):
    case = with_dtypes(case, dtypes, head_scales=True)
    inputs, out = check_single(target, case)
    own, _ = runner.single(inputs, backend=target.backend)
    assert own.dtype == case.dtype_o
    assert torch.equal(own.view(torch.uint8), out.view(torch.uint8))


PAGED = Case("paged", (9, 3), (30, 5), 4, 2, 64, page_size=16, mask=CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)


@every_dtype
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_one_factor_for_a_tensor(target, case, dtypes, as_tensors):
    """q_scale and k_scale multiply the logits and v_scale the output, beside those of the heads."""
    for head_scales in (False, True):
        case = with_dtypes(case, dtypes, head_scales=head_scales)
        inputs = build(case, device=target.device)
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        factors = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": -0.25}
        if as_tensors:
            factors = {n: torch.tensor([x], device=target.device) for n, x in factors.items()}
        out, lse = runner.run(wrapper, inputs, **factors)
        pipeline = dataclasses.replace(inputs.pipeline, sm_scale=case.scale * 1.5, out_scale=-0.25)
        runner.compare(inputs, out, lse, reference(inputs, pipeline=pipeline)).check()


@pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
def test_factors_of_one_tensor_alone(target, name):
    case = with_dtypes(RAGGED, (E4M3, None, None), head_scales=True)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    others = {"scale_q": None, "scale_k": None, "scale_v": None}
    factors = getattr(inputs.scales, name[-1])
    out, lse = runner.run(wrapper, inputs, **{**others, name: factors})
    inputs.scales = dataclasses.replace(type(inputs.scales)(), **{name[-1]: factors})
    runner.compare(inputs, out, lse).check()


def test_too_large_for_e4m3(target):
    """The format has no infinity: 448 stands for all that is larger."""
    case = with_dtypes(RAGGED, (E4M3, None, E4M3))
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs, v_scale=3000.0)
    pipeline = dataclasses.replace(inputs.pipeline, out_scale=3000.0)
    runner.compare(inputs, out, lse, reference(inputs, pipeline=pipeline)).check()
    assert (out.float().abs() == 448).any()
    assert not out.float().isnan().any()


def test_planned_by_name(target):
    case = with_dtypes(PAGED, (HALF, E4M3, None))
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, q_data_type="float16", kv_data_type="float8_e4m3fn")
    name = "_kve4m3_" if target.device == "cpu" else "_converted"
    assert name in wrapper.variant
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_single_plans_are_kept_apart(target):
    """Requests that differ in the dtype of their keys alone."""
    for kv in (None, E4M3, E5M2, None, E4M3):
        case = with_dtypes(SINGLE[0], (BFLOAT, kv, None))
        inputs = build(case, device=target.device)
        runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


# ---- what is refused

PLAN = {
    "kv_16_of_e5m2": ({"q_data_type": E5M2, "kv_data_type": HALF}, TypeError, "must be 8-bit"),
    "out_of_e5m2": (
        {"q_data_type": E5M2, "kv_data_type": None, "o_data_type": E4M3},
        NotImplementedError,
        "o_data_type=torch.float8_e4m3fn: for float8_e5m2 queries",
    ),
    "q_fnuz": ({"q_data_type": torch.float8_e4m3fnuz}, TypeError, "q_data_type=.*e4m3fnuz: must"),
    "kv_wider": ({"q_data_type": E4M3, "kv_data_type": HALF}, TypeError, "kv_data_type=.*float16"),
    "kv_e5m2": ({"q_data_type": E4M3, "kv_data_type": E5M2}, TypeError, "kv_data_type=.*e5m2"),
    "kv_other": ({"kv_data_type": BFLOAT}, TypeError, "kv_data_type=torch.bfloat16: must be q's"),
    "name": ({"kv_data_type": "fp8_e4m4"}, ValueError, "kv_data_type='fp8_e4m4': not the name"),
    "out_fp8": ({"o_data_type": E4M3}, NotImplementedError, "o_data_type=torch.float8_e4m3fn"),
    "out_float32": (
        {"q_data_type": E4M3, "kv_data_type": None, "o_data_type": torch.float32},
        NotImplementedError,
        "o_data_type=torch.float32",
    ),
    "out_e5m2": (
        {"q_data_type": E4M3, "kv_data_type": None, "o_data_type": E5M2},
        NotImplementedError,
        "o_data_type=torch.float8_e5m2",
    ),
}


@pytest.mark.parametrize(("options", "error", "why"), PLAN.values(), ids=PLAN)
def test_plan_refuses(target, options, error, why):
    case = dataclasses.replace(PAGED, dtype=HALF)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    with pytest.raises(error, match=why):
        runner.plan(wrapper, inputs, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


RUN = {
    "list": ("scale_k", lambda t: t.tolist(), TypeError, "scale_k must be a torch.Tensor"),
    "half": ("scale_v", torch.Tensor.half, TypeError, "scale_v is torch.float16; must be"),
    "too_few": ("scale_q", lambda t: t[:-1], ValueError, r"scale_q has shape \(3,\).*num_qo_heads"),
    "of_q": ("scale_v", lambda t: t.repeat(2), ValueError, r"scale_v has shape \(4,\).*num_kv_he"),
    "strided": ("scale_q", lambda t: t.repeat(2)[::2], ValueError, "scale_q has strides"),
    "meta": ("scale_k", lambda t: t.to("meta"), ValueError, "scale_k has no memory"),
}


@pytest.mark.parametrize(("name", "spoil", "error", "why"), RUN.values(), ids=RUN)
@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_run_refuses(target, case, name, spoil, error, why):
    inputs = build(with_dtypes(case, (E4M3, None, None), head_scales=True), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    with pytest.raises(error, match=why):
        runner.run(wrapper, inputs, **{name: spoil(getattr(inputs.scales, name[-1]))})
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
@pytest.mark.parametrize("dtypes", [(HALF, None, None), (HALF, E4M3, None)], ids=str)
def test_factors_of_heads_are_for_fp8(target, dtypes, name):
    inputs = build(with_dtypes(RAGGED, dtypes), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    factors = torch.ones(4 if name == "scale_q" else 2, device=target.device)
    if dtypes[1] is None or name == "scale_q":
        with pytest.raises(ValueError, match=f"{name}: only an fp8 tensor.*{name[-1]}_scale"):
            runner.run(wrapper, inputs, **{name: factors})
    else:
        runner.compare(inputs, *runner.run(wrapper, inputs, **{name: factors})).check()


def test_factors_are_checked_for_the_queries_of_each_plan(target):
    """Queries of e5m2 become float16: the two plans differ in nothing else."""
    inputs = build(with_dtypes(RAGGED, (HALF, torch.float8_e5m2, None)), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    factors = torch.full((4,), 0.5, device=target.device)
    for q_dtype in (HALF, torch.float8_e5m2, HALF):
        runner.plan(wrapper, inputs, q_data_type=q_dtype, o_data_type=HALF)
        q = inputs.q.to(q_dtype)
        if q_dtype is HALF:
            with pytest.raises(ValueError, match="scale_q: only an fp8 tensor"):
                wrapper.run(q, inputs.k, inputs.v, scale_q=factors)
        else:
            given = wrapper.run(q, inputs.k, inputs.v, scale_q=factors)
            torch.testing.assert_close(given, wrapper.run(q, inputs.k, inputs.v, q_scale=0.5))


def test_several_factors_in_place_of_one(target):
    inputs = build(with_dtypes(RAGGED, (E4M3, None, None)), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    with pytest.raises(ValueError, match=r"k_scale has 2 elements.*scale_k"):
        runner.run(wrapper, inputs, k_scale=torch.ones(2, device=target.device))


def test_tensors_of_another_dtype(target):
    inputs = build(with_dtypes(RAGGED, (BFLOAT, E4M3, None)), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    with pytest.raises(TypeError, match=r"k is torch.float8_e5m2; must be torch.float8_e4m3fn"):
        wrapper.run(inputs.q, inputs.k.view(E5M2), inputs.v)
    with pytest.raises(TypeError, match=r"v is torch.bfloat16; must be torch.float8_e4m3fn"):
        wrapper.run(inputs.q, inputs.k, inputs.v.bfloat16())
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_outputs_lie_apart_from_factors(target):
    inputs = build(with_dtypes(RAGGED, (E4M3, None, BFLOAT)), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out = torch.zeros(12, 4, 64, dtype=BFLOAT, device=target.device)
    for name, count in (("scale_q", 4), ("scale_k", 2), ("scale_v", 2)):
        within = out.view(-1)[64 : 64 + 2 * count].view(torch.float32)
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            wrapper.run(inputs.q, inputs.k, inputs.v, out=out, **{name: within})
