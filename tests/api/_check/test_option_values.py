"""Options that are accepted: defaults, hints, both names of one option, and options in arrays and
tensors of one element, of which the value counts, not the object."""

import numpy as np
import preflash
import pytest
import torch
from planned_cases import check_run, plan_arguments, planned
from preflash.testing import Case, build, compare, poison, reference, runner
from preflash.testing.oracle import Pipeline

RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = Case("paged", (9, 3), (30, 5), 4, 2, 64, page_size=16)
SINGLE = Case("single", (9,), (30,), 4, 2, 64)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_what_changes_nothing(target, case):
    """None, zero and explicit defaults, as engines pass them."""
    zero = dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"))
    zero |= {"token_pos_in_items_len": 0, "fixed_split_size": -1, "use_fp16_qk_reduction": True}
    encoding = {"pos_encoding_mode": "NONE", "rope_scale": 1, "rope_theta": 1e4}
    inputs, wrapper = planned(case, target, **zero, **encoding, o_data_type=case.dtype)
    check_run(inputs, wrapper, sinks=None, kv_cache_sf=None, enable_pdl=None)


def test_lengths_that_agree(target):
    table = torch.zeros(2, 4, dtype=torch.int32, device=target.device)
    for i, pages in enumerate(build(PAGED).page_table):
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    lengths = {"seq_lens": torch.tensor([30, 5]).int(), "seq_lens_q": torch.tensor([9, 3]).int()}
    bounds = {"max_token_per_sequence": 9, "max_sequence_kv": 64}
    check_run(*planned(PAGED, target, **lengths, **bounds, block_tables=table))


def test_single_scales(target):
    """q_scale, k_scale and v_scale mean in the single function what they mean in run()."""
    inputs = build(SINGLE, device=target.device)
    out, lse = runner.single(inputs, backend=target.backend, q_scale=0.5, k_scale=3.0, v_scale=0.25)
    pipeline = Pipeline(SINGLE.scale * 1.5, out_scale=0.25)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()


@pytest.mark.parametrize("name", ["o_dtype", "o_data_type"])
def test_single_output_type_by_both_names(target, name):
    inputs = build(SINGLE, device=target.device)
    result = runner.single(inputs, backend=target.backend, **{name: SINGLE.dtype})
    runner.compare(inputs, *result).check()


def test_single_out_and_lse_buffers(target):
    inputs = build(SINGLE, device=target.device)
    out = poison(inputs.q.shape, SINGLE.dtype, target.device)
    lse = poison((4, 9), torch.float32, target.device)
    got = preflash.single_prefill_with_kv_cache_return_lse(
        inputs.q, inputs.k[:30], inputs.v[:30], out=out, lse=lse, lse_layout="HN", lse_base="ln"
    )
    assert got[0].data_ptr() == out.data_ptr()
    assert got[1].data_ptr() == lse.data_ptr()
    runner.compare(inputs, out, lse.t(), lse_base="ln").check()


# --- arrays and tensors of one element ---------------------------------------


@pytest.fixture
def tensors(target):
    generator = torch.Generator().manual_seed(0)
    shapes = ((33, HEADS), (90, KV_HEADS), (90, KV_HEADS))
    made = (torch.randn(*shape, HEAD_DIM, generator=generator) for shape in shapes)
    return [one.to(target.device, torch.float16) for one in made]


@pytest.fixture
def single(target, tensors):
    """The function with the tensors."""
    return lambda **options: preflash.single_prefill_with_kv_cache(
        *tensors, backend=target.backend, **options
    )


@pytest.fixture
def pod(target, tensors):
    """run() of a prefill with the tensors, and a decode of 5 keys; returns the prefill's output."""
    device = target.device
    wrapper = preflash.PODWithPagedKVCacheWrapper(runner.workspace(device), backend=target.backend)
    indptr, pages, last = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0], [5]))
    wrapper.plan(indptr, pages, last, HEADS, KV_HEADS, HEAD_DIM, 16)
    q_d = tensors[0][:1].clone()
    cache = torch.randn(1, 2, 16, KV_HEADS, HEAD_DIM).to(device, torch.float16)
    return lambda **options: wrapper.run(*tensors, q_d, cache, **options)[0]


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_a_window_that_changes_in_place(single, pod, make):
    """The plan of one request is found again by its options."""
    window = make(40)
    narrow = single(window_left=3)
    assert torch.equal(single(window_left=window), single(window_left=40))
    assert torch.equal(pod(window_left_p=window), pod(window_left_p=40))
    window[()] = 3
    assert torch.equal(single(window_left=window), narrow)
    assert torch.equal(pod(window_left_p=window), pod(window_left_p=3))
    assert not torch.equal(narrow, single(window_left=40))


def test_arrays_of_numpy(single, pod):
    """An array has no hash."""
    options = {"causal": np.array(True), "logits_soft_cap": np.array(2.0)}
    assert torch.equal(single(**options), single(causal=True, logits_soft_cap=2.0))
    assert torch.equal(pod(causal_p=np.array(True)), pod(causal_p=True))


def without_memory(kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "meta":
        return torch.empty(1, dtype=dtype, device="meta")
    value = torch.zeros(1, dtype=dtype)
    value.untyped_storage().resize_(0)
    return value


MEMORYLESS = [
    (without_memory(kind, torch.int32), ValueError, "has no") for kind in ("meta", "freed")
]
WINDOWS = [
    *(
        (wrong, TypeError, "must be an integer")
        for wrong in (torch.tensor(True), torch.tensor(1.0), torch.ones(2).int(), True)
    ),
    *MEMORYLESS,
]


@pytest.mark.parametrize(("wrong", "error", "says"), WINDOWS)
def test_windows_that_are_no_integer(single, pod, wrong, error, says):
    """A message does not read a tensor without memory, either."""
    single(window_left=1)
    pod(window_left_p=1)
    with pytest.raises(error, match=f"^window_left {says}"):
        single(window_left=wrong)
    with pytest.raises(error, match=f"^prefill side: window_left {says}"):
        pod(window_left_p=wrong)


@pytest.mark.parametrize("kind", ["meta", "freed"])
@pytest.mark.parametrize("name", ["causal", "logits_soft_cap", "kv_layout"])
def test_options_without_memory(single, kind, name):
    single(logits_soft_cap=2.0, window_left=5, causal=True)  # to compare with
    with pytest.raises(TypeError, match=rf"^{name} must be .* got Tensor \(1,\) torch.float32$"):
        single(**{name: without_memory(kind, torch.float32)})


@pytest.mark.parametrize(("integer", "error", "says"), MEMORYLESS)
@pytest.mark.parametrize("name", ["num_qo_heads", "token_pos_in_items_len"])
def test_numbers_of_plan_without_memory(target, name, integer, error, says):
    inputs, wrapper = planned(RAGGED, target)
    with pytest.raises(error, match=rf"^{name} {says} memory"):
        wrapper.plan(**{**plan_arguments(inputs), name: integer})
