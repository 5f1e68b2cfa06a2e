"""Options may be defaults, hints, names of another release, and arrays or tensors of one element,
whose value counts."""

import dataclasses

import numpy as np
import preflash
import pytest
import torch
from planned_cases import check_run, plan_arguments, planned
from preflash.testing import Case, build, compare, poison, reference, runner
from preflash.testing.oracle import Pipeline
from wrapper_options import hints

RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = Case("paged", (9, 3), (30, 5), 4, 2, 64, page_size=16)
SINGLE = Case("single", (9,), (30,), 4, 2, 64)


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_what_changes_nothing(target, case):
    """Engines pass None, zero and explicit defaults."""
    zero = dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"))
    zero |= {"token_pos_in_items_len": 0, "fixed_split_size": -1, "use_fp16_qk_reduction": True}
    encoding = {"pos_encoding_mode": "NONE", "rope_scale": 1, "rope_theta": 1e4}
    inputs, wrapper = planned(case, target, **zero, **encoding, o_data_type=case.dtype)
    check_run(inputs, wrapper, sinks=None, kv_cache_sf=None, enable_pdl=None)


def test_lengths_that_agree(target):
    uniform = dataclasses.replace(PAGED, qo_lens=(3, 3))
    for case in (PAGED, uniform):
        check_run(*planned(case, target, **hints(build(case, device=target.device))))


def test_scales_and_outputs_of_single(target):
    """Scales and dtypes of outputs mean in a single call what they mean in run()."""
    inputs = build(SINGLE, device=target.device)
    out, lse = runner.single(inputs, backend=target.backend, q_scale=0.5, k_scale=3.0, v_scale=0.25)
    pipeline = Pipeline(SINGLE.scale * 1.5, out_scale=0.25)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()
    out = poison(inputs.q.shape, SINGLE.dtype, target.device)
    lse = poison((4, 9), torch.float32, target.device)
    got = preflash.single_prefill_with_kv_cache_return_lse(
        inputs.q, inputs.k[:30], inputs.v[:30], out=out, lse=lse, lse_layout="HN", lse_base="ln"
    )
    assert [x.data_ptr() for x in got] == [out.data_ptr(), lse.data_ptr()]
    runner.compare(inputs, out, lse.t(), lse_base="ln").check()


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
    """The plan of a request is remembered by the values of its options."""
    window = make(40)
    for width in (40, 3):
        window[()] = width
        assert torch.equal(single(window_left=window), single(window_left=width))
        assert torch.equal(pod(window_left_p=window), pod(window_left_p=width))
    assert not torch.equal(single(window_left=3), single(window_left=40))
    options = {"causal": np.array(True), "logits_soft_cap": np.array(2.0)}
    assert torch.equal(single(**options), single(causal=True, logits_soft_cap=2.0))
    assert torch.equal(pod(causal_p=np.array(True)), pod(causal_p=True))


def test_a_mask_is_another_plan(target, tensors, single, pod):
    """Calls that are equal but for a mask, or for head_dim_vo."""
    mask = target.to(torch.ones(33, 90).tril() > 0)
    for call, name in ((single, "custom_mask"), (pod, "custom_mask_p")):
        full = call()
        assert not torch.equal(call(**{name: mask}), full)
        assert torch.equal(call(), full)
    tensors[2] = tensors[2][..., :32].contiguous()
    torch.testing.assert_close(single(), full[..., :32], atol=1e-3, rtol=1e-2)


def without_memory(kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "meta":
        return torch.empty(1, dtype=dtype, device="meta")
    value = torch.zeros(1, dtype=dtype)
    value.untyped_storage().resize_(0)
    return value


INT, FLOAT = torch.int32, torch.float32
NO_INTEGERS = (torch.tensor(True), torch.tensor(1.0), torch.ones(2).int(), True)
# An option of the single function, a value, and the error with what it says.
REFUSED = [
    *(("window_left", value, TypeError, "must be an integer") for value in NO_INTEGERS),
    *(("window_left", without_memory(kind, INT), ValueError, "has no memory")
      for kind in ("meta", "freed")),
    *((name, without_memory(kind, FLOAT), TypeError, r"must be .* got Tensor \(1,\) torch.float32$")
      for name in ("causal", "logits_soft_cap", "kv_layout") for kind in ("meta", "freed")),
]  # fmt: skip


def test_refusals(target, single, pod):
    """A message does not read a tensor without memory, either."""
    single(logits_soft_cap=2.0, window_left=1, causal=True)  # is remembered, and compared with
    single(window_left=1)
    pod(window_left_p=1)
    for name, value, error, says in REFUSED:
        with pytest.raises(error, match=f"^{name} {says}"):
            single(**{name: value})
        if name == "window_left":
            with pytest.raises(error, match=f"^prefill side: {name} {says}"):
                pod(window_left_p=value)
    inputs, wrapper = planned(RAGGED, target)
    for name in ("num_qo_heads", "token_pos_in_items_len"):
        for kind in ("meta", "freed"):
            with pytest.raises(ValueError, match=rf"^{name} has no memory"):
                wrapper.plan(**{**plan_arguments(inputs), name: without_memory(kind, INT)})
