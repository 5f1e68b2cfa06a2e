"""Values of options: numbers at the limits of float32 and of the kernels, defaults, hints, names of
dtypes, and arrays or tensors of one element, whose value counts."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import preflash
import pytest
import torch
from changed_tensors import freed, meta
from planned_cases import check_run, plan_arguments, planned, unplanned
from preflash.testing import Case, MaskKind, Position, Sinks, build, reference, runner
from refusals import all_refused, refused

CASE = Case("values", (40,), (200,), 2, 1, 64, mask=MaskKind.CAUSAL)
ALIBI = dataclasses.replace(CASE, position=Position.ALIBI)
RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SINGLE = dataclasses.replace(RAGGED, name="single", qo_lens=(9,), kv_lens=(30,))

SMALLEST_BIASED_SCALE, LARGEST_LOGITS_SCALE, LARGEST_SOFT_CAP = 1e-30, 2.358e38, 1e30
ROPE = {"pos_encoding_mode": "ROPE_LLAMA"}
# Options of plan(), options of run(), and what the ValueError says.
TOGETHER = [
    ({"sm_scale": 1.2e38}, {"q_scale": 2.0}, r"\bq_scale"),
    ({"sm_scale": 1e33, "logits_soft_cap": 1e-6}, {}, r"\bsm_scale.*logits_soft_cap"),
    *(({"sm_scale": value, "pos_encoding_mode": "ALIBI"}, {}, r"\bsm_scale.*ALiBi")
      for value in (1e-38, 9e-31, -9e-31)),
    ({"pos_encoding_mode": "ALIBI", "rope_scale": 2.0}, {}, "it is 'ALIBI'"),
    ({**ROPE, "rope_scale": 0.0}, {}, "rope_scale=0.0: must be positive"),
    ({**ROPE, "rope_theta": math.inf}, {}, "rope_theta=inf: must be finite"),
    ({**ROPE, "rope_scale": 1e-5}, {}, "rope_scale=1e-05 .*radians"),
    ({**ROPE, "rope_theta": 1e-9}, {}, "rope_theta=1e-09: .*radians"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "run", "says"), TOGETHER)
def test_values_that_do_not_go_together(target, plan, run, says):
    inputs, wrapper = unplanned(CASE, target)

    def plan_and_run():
        runner.plan(wrapper, inputs, **plan)
        wrapper.run(inputs.q, inputs.k, inputs.v, **run)

    single = functools.partial(runner.single, inputs, backend=target.backend, **plan, **run)
    all_refused(f"(?s){says}", (plan_and_run, single))
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


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_what_changes_nothing(target, case):
    """Engines pass None, zero, explicit defaults, and the largest int32 where others write -1."""
    zero = dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"))
    zero |= {"token_pos_in_items_len": 0, "fixed_split_size": -1, "use_fp16_qk_reduction": True}
    zero |= {"pos_encoding_mode": "NONE", "rope_scale": 1, "rope_theta": 1e4}
    for window in (-1, 2**30, 2**31 - 1):
        options = {**zero, "window_left": window, "o_data_type": case.dtype}
        inputs, wrapper = planned(case, target, **options)
        check_run(inputs, wrapper, sinks=None, kv_cache_sf=None, enable_pdl=None)
        check_run(inputs, wrapper, window_left=window)


F16, BF16, F32, E4M3, E5M2 = (
    (torch.float16, "f16 fp16 float16 half torch.float16"),
    (torch.bfloat16, "bf16 bfloat16 torch.bfloat16"),
    (torch.float32, "f32 fp32 float32 float torch.float32"),
    (torch.float8_e4m3fn, "e4m3 fp8_e4m3 float8_e4m3fn"),
    (torch.float8_e5m2, "e5m2 fp8_e5m2 float8_e5m2"),
)


@pytest.mark.parametrize(
    "dtypes",
    [*((one,) * 3 for one in (F16, BF16, F32)), (BF16, E4M3, BF16), (F16, E5M2, F16),
     (E4M3, E4M3, F16)],
    ids=lambda dtypes: "-".join(names.split()[0] for _, names in dtypes),
)  # fmt: skip
def test_dtypes_by_name(target, dtypes):
    """run() refuses tensors of another dtype than the plan's, so every name means its dtype."""
    if F32 in dtypes and target.backend != "cpu":
        pytest.skip("only the CPU computes in float32")
    (q, kv, out), names = zip(*dtypes, strict=True)
    case = dataclasses.replace(CASE, dtype=q, kv_dtype=kv, o_dtype=out)
    inputs, wrapper = planned(case, target)
    variant, expected = wrapper.variant, check_run(inputs, wrapper)[0]
    for each in itertools.zip_longest(*map(str.split, names)):
        options = zip(("q_data_type", "kv_data_type", "o_data_type"), each, strict=True)
        runner.plan(wrapper, inputs, **{option: name for option, name in options if name})
        assert wrapper.variant == variant
        result = wrapper.run(inputs.q, inputs.k, inputs.v)
        assert result.dtype is out
        assert torch.equal(result.float(), expected.float())


@pytest.fixture
def tensors(target):
    inputs = build(Case("long", (33,), (90,), 4, 2, 64), device=target.device)
    return [one.half() for one in (inputs.q, inputs.k[:90], inputs.v[:90])]


@pytest.fixture
def single(target, tensors):
    return lambda **options: preflash.single_prefill_with_kv_cache(
        *tensors, backend=target.backend, **options
    )


@pytest.fixture
def pod(target, tensors):
    """Runs a prefill with the tensors beside a decode; returns the prefill's output."""
    device = target.device
    wrapper = preflash.PODWithPagedKVCacheWrapper(runner.workspace(device), backend=target.backend)
    indptr, pages, last = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0], [5]))
    wrapper.plan(indptr, pages, last, 4, 2, 64, 16)
    q_d = tensors[0][:1].clone()
    cache = torch.randn(1, 2, 16, 2, 64).to(device, torch.float16)
    return lambda **options: wrapper.run(*tensors, q_d, cache, **options)[0]


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_values_that_change_in_place_and_have_no_hash(single, pod, make):
    window = make(40)
    for width in (40, 3):
        window[()] = width
        assert torch.equal(single(window_left=window), single(window_left=width))
        assert torch.equal(pod(window_left_p=window), pod(window_left_p=width))
    assert not torch.equal(single(window_left=3), single(window_left=40))
    options = {"causal": np.array(True), "logits_soft_cap": np.array(2.0)}
    assert torch.equal(single(**options), single(causal=True, logits_soft_cap=2.0))
    assert torch.equal(pod(causal_p=np.array(True)), pod(causal_p=True))


# Changes of a request; sinks alone are no other plan.
CHANGES = [
    {}, {"kv_dtype": torch.float8_e4m3fn}, {"kv_dtype": torch.float8_e5m2}, {"head_dim_vo": 32},
    {"mask": MaskKind.CAUSAL}, {"mask": MaskKind.CUSTOM}, {"sinks": Sinks.ORDINARY},
    {"sinks": Sinks.MIXED},
    *({"position": Position.ROPE, "rope_scale": scale, "rope_theta": theta}
      for scale, theta in ((1.0, 1e4), (2.0, 1e4), (2.0, 50.0))),
]  # fmt: skip


def test_plans_of_single_requests_are_kept_apart(target):
    for change in CHANGES * 2:
        inputs = build(dataclasses.replace(SINGLE, **change), device=target.device)
        runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


INTS = torch.zeros(1, dtype=torch.int32)
NO_INTEGERS = (torch.tensor(True), torch.tensor(1.0), torch.ones(2).int(), True)
NO_FLOAT = r"must be .* got Tensor \(1,\) torch.float32$"
# An option of the single function, a value, and the error with what it says.
REFUSED = [
    *(("window_left", value, TypeError, "must be an integer") for value in NO_INTEGERS),
    *(("window_left", change(INTS), ValueError, "has no memory") for change in (meta, freed)),
    *((name, change(INTS.float()), TypeError, NO_FLOAT)
      for name in ("causal", "logits_soft_cap", "kv_layout") for change in (meta, freed)),
    ("rope_scale", True, TypeError, ""),  # True and 1.0 are equal keys of a dict
]  # fmt: skip


def test_refusals(target, single, pod):
    """A message does not read a tensor without memory, either."""
    single(logits_soft_cap=2.0, window_left=1, causal=True)  # is remembered, and compared with
    single(window_left=1, rope_scale=1.0)
    pod(window_left_p=1)
    for name, value, error, says in REFUSED:
        says = f"{name} {says}"
        refused(f"^{says}", single, error=error, **{name: value})
        if name == "window_left":
            refused(f"^prefill side: {says}", pod, error=error, window_left_p=value)
    inputs, wrapper = planned(RAGGED, target)
    for name, change in itertools.product(
        ("num_qo_heads", "token_pos_in_items_len"), (meta, freed)
    ):
        wrong = {**plan_arguments(inputs), name: change(INTS)}
        refused(f"^{name} has no memory", wrapper.plan, **wrong)
