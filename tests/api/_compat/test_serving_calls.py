"""Call sequences of serving engines, argument by argument as they make them."""

import dataclasses
import math

import preflash as flashinfer
import pytest
import torch
from preflash.testing import Case, KvForm, MaskKind, build, compare, poison, reference, runner
from preflash.testing.oracle import Pipeline

# Prefill chunks with history beside decodes, K and V as two halves of one last dimension.
VLLM = Case(
    "vllm",
    (1, 1, 40, 9),
    (90, 17, 40, 129),
    8,
    2,
    128,
    page_size=16,
    form=KvForm.HALVES,
    mask=MaskKind.CAUSAL,
)


def pinned(t: torch.Tensor) -> torch.Tensor:
    return t.pin_memory() if torch.cuda.is_available() else t


def vllm_plan(wrapper, inputs, **changes) -> None:
    case = inputs.case
    options = {
        "qo_indptr": pinned(inputs.qo_indptr.cpu()),
        "paged_kv_indptr": pinned(inputs.kv_indptr.cpu()),
        "paged_kv_indices": inputs.indices,
        "paged_kv_last_page_len": pinned(inputs.last_page_len.cpu()),
        "seq_lens": pinned(torch.tensor(case.kv_lens, dtype=torch.int32)),
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim_qk": case.head_dim,
        "page_size": case.page_size,
        "causal": True,
        "sm_scale": case.scale,
        "window_left": -1,
        "logits_soft_cap": None,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype,
        "o_data_type": case.dtype,
        "fixed_split_size": -1,
        "disable_split_kv": False,
    }
    wrapper.plan(**{**options, **changes})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_vllm_paged(target, layout):
    case = Case(
        "vllm",
        VLLM.qo_lens,
        VLLM.kv_lens,
        8,
        2,
        128,
        page_size=16,
        form=KvForm.HALVES,
        layout=layout,
        mask=MaskKind.CAUSAL,
    )
    inputs = build(case, device=target.device)
    work = torch.zeros(runner.WORKSPACE_BYTES, dtype=torch.uint8, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(work, layout, backend="auto")
    vllm_plan(wrapper, inputs)
    assert wrapper._window_left == -1
    assert wrapper._logits_soft_cap == 0.0
    assert wrapper._sm_scale == case.scale
    assert wrapper._causal is True
    out = poison(inputs.q.shape, case.dtype, target.device)
    wrapper.run(
        inputs.q,
        (inputs.k, inputs.v),
        q_scale=1.0,
        k_scale=1.0,
        v_scale=1.0,
        out=out,
        kv_cache_sf=None,
    )
    runner.compare(inputs, out, None).check()


def test_vllm_batch_invariant_plan(target):
    """fixed_split_size=4096 with disable_split_kv=True, as vLLM asks for batch invariance."""
    inputs = build(VLLM, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend="auto"
    )
    vllm_plan(wrapper, inputs, fixed_split_size=4096, disable_split_kv=True)
    out, lse = wrapper.run(inputs.q, (inputs.k, inputs.v), return_lse=True)
    runner.compare(inputs, out, lse).check()


def test_vllm_gemma_layer_settings(target):
    inputs = build(VLLM, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend="auto"
    )
    vllm_plan(wrapper, inputs, window_left=31, logits_soft_cap=20.0, sm_scale=0.11)
    assert (wrapper._window_left, wrapper._logits_soft_cap) == (31, 20.0)
    out = poison(inputs.q.shape, VLLM.dtype, target.device)
    wrapper.run(inputs.q, (inputs.k, inputs.v), k_scale=1.0, v_scale=1.0, out=out)
    expected = reference(inputs, pipeline=Pipeline(0.11, True, 31, 20.0))
    compare(out, None, expected, soft_cap=20.0).check()


def test_vllm_context_parallel(target):
    """Context over the paged cache without mask, new tokens ragged with it, merged by log-sums."""
    inputs = build(VLLM, device=target.device)
    context = flashinfer.BatchPrefillWithPagedKVCacheWrapper(runner.workspace(target.device), "NHD")
    vllm_plan(context, inputs, causal=False, o_data_type=None)
    out_c, lse_c = context.run(
        inputs.q, (inputs.k, inputs.v), k_scale=1.0, v_scale=1.0, return_lse=True
    )
    full = reference(inputs, pipeline=Pipeline(VLLM.scale))
    compare(out_c, lse_c, full).check()

    fresh_case = Case("new", VLLM.qo_lens, VLLM.qo_lens, 8, 2, 128, mask=MaskKind.CAUSAL)
    fresh = build(fresh_case, device=target.device, seed=5)
    fresh.q = inputs.q
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(target.device))
    wrapper.plan(
        qo_indptr=fresh.qo_indptr,
        kv_indptr=fresh.kv_indptr,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=128,
        head_dim_vo=128,
        causal=True,
        sm_scale=VLLM.scale,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=VLLM.dtype,
    )
    out_n, lse_n = wrapper.run(fresh.q, fresh.k, fresh.v, return_lse=True)
    recent = reference(fresh)
    compare(out_n, lse_n, recent).check()

    # What the engine does next: log2 to ln, [tokens, heads] to [heads, tokens].
    ln = (lse_n * math.log(2)).t().contiguous()
    out, lse = flashinfer.merge_state(out_c, lse_c, out_n, ln.t() / math.log(2))
    total = torch.log2(torch.exp2(full.lse) + torch.exp2(recent.lse))
    torch.testing.assert_close(lse.double(), total, rtol=0, atol=1e-3)
    weight = torch.exp2(full.lse - total)[..., None]
    merged = weight * full.out + (1 - weight) * recent.out
    torch.testing.assert_close(out.double(), merged, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("index_device", ["host", "device"])
def test_vllm_mla_prefill(target, index_device):
    """Ragged (192, 128) without grouping, out handed in."""
    case = Case("mla", (37, 100, 1), (37, 211, 9), 4, 4, 192, 128, mask=MaskKind.CAUSAL)
    where = target.device if index_device == "device" else "cpu"
    inputs = build(case, device=target.device, index_device=where)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend="auto"
    )
    wrapper.plan(
        qo_indptr=inputs.qo_indptr,
        kv_indptr=inputs.kv_indptr,
        num_qo_heads=4,
        num_kv_heads=4,
        head_dim_qk=192,
        head_dim_vo=128,
        causal=True,
        sm_scale=case.scale,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=case.dtype,
        o_data_type=case.dtype,
    )
    out = poison((138, 4, 128), case.dtype, target.device)
    result = wrapper.run(q=inputs.q, k=inputs.k, v=inputs.v, out=out, return_lse=True)
    runner.compare(inputs, out, result[1]).check()


def test_vllm_sparse_pages(target):
    """Positional plan with head_dim 192 and page 8, one query per request, without splits."""
    case = Case("sparse", (1,) * 5, (8, 64, 3, 100, 31), 8, 1, 192, page_size=8)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    wrapper.plan(
        inputs.qo_indptr,
        inputs.kv_indptr,
        inputs.indices,
        inputs.last_page_len,
        8,
        1,
        192,
        8,
        head_dim_vo=192,
        causal=False,
        sm_scale=case.scale,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
        disable_split_kv=True,
        max_token_per_sequence=1,
    )
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache, return_lse=True)).check()


SGLANG = Case(
    "sglang", (7, 30, 1, 12), (60, 30, 200, 77), 8, 2, 128, page_size=1, mask=MaskKind.CAUSAL
)


def sglang_begin(wrapper, inputs, **changes) -> None:
    """page_size 1, indptr on the device, indices longer than needed, everything else by keyword."""
    case = inputs.case
    spare = torch.zeros(256, dtype=torch.int32, device=inputs.indices.device)
    wrapper.begin_forward(
        inputs.qo_indptr,
        inputs.kv_indptr,
        torch.cat([inputs.indices, spare]),
        inputs.last_page_len,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        1,
        **{
            "q_data_type": case.dtype,
            "kv_data_type": case.dtype,
            "custom_mask": None,
            "non_blocking": True,
            "fixed_split_size": None,
            "prefix_len_ptr": None,
            "token_pos_in_items_ptr": None,
            "token_pos_in_items_len": 0,
            "max_item_len_ptr": None,
            **changes,
        },
    )


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("window", [-1, 20])
def test_sglang_paged_forward(target, cap, window):
    inputs = build(SGLANG, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    sglang_begin(wrapper, inputs)
    out = wrapper.forward(
        inputs.q,
        (inputs.k, inputs.v),
        causal=True,
        sm_scale=0.1,
        window_left=window,
        logits_soft_cap=cap,
        k_scale=1.5,
        v_scale=0.5,
    )
    pipeline = Pipeline(0.15, True, window, cap, out_scale=0.5)
    compare(out, None, reference(inputs, pipeline=pipeline), soft_cap=cap).check()


def test_sglang_slot_pool_of_tokens(target):
    """The token pool is [slots, heads, dim]; SGLang hands it over as it is."""
    case = Case(
        "pool", (7, 30), (60, 30), 8, 2, 128, page_size=1, form=KvForm.FLAT, mask=MaskKind.CAUSAL
    )
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    sglang_begin(wrapper, inputs)
    out, lse = wrapper.forward_return_lse(inputs.q, (inputs.k, inputs.v), causal=True)
    runner.compare(inputs, out, lse).check()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_sglang_tree_mask(target, dtype):
    """Speculative verification: a flat mask, bool or integers, with causal=False in forward."""
    case = Case("tree", (5, 5, 5), (60, 33, 200), 8, 2, 128, page_size=1, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    sglang_begin(wrapper, inputs, custom_mask=inputs.custom_mask.to(dtype))
    out = wrapper.forward(
        inputs.q,
        (inputs.k, inputs.v),
        causal=False,
        sm_scale=case.scale,
        window_left=-1,
        logits_soft_cap=0.0,
    )
    runner.compare(inputs, out, None).check()
    # The same wrapper verifies nothing in the next step: the mask must be gone.
    sglang_begin(wrapper, inputs)
    out = wrapper.forward(inputs.q, (inputs.k, inputs.v), causal=True, sm_scale=case.scale)
    compare(out, None, reference(inputs_without_mask(inputs))).check()


def inputs_without_mask(inputs):
    """The same tensors as a causal problem."""
    import dataclasses

    case = dataclasses.replace(inputs.case, mask=MaskKind.CAUSAL)
    return dataclasses.replace(inputs, case=case, masks=None, custom_mask=None)


def test_sglang_ragged_then_paged_prefix(target):
    """Extend: new tokens ragged and causal, the cached prefix paged without mask, merge_state."""
    prefix_lens, new_lens = (50, 1, 130), (20, 7, 40)
    paged_case = Case("prefix", new_lens, prefix_lens, 8, 2, 128, page_size=1)
    ragged_case = Case("new", new_lens, new_lens, 8, 2, 128, mask=MaskKind.CAUSAL)
    paged, ragged = (build(c, device=target.device) for c in (paged_case, ragged_case))
    ragged.q = paged.q

    wrapper_ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend="auto"
    )
    wrapper_ragged.begin_forward(
        ragged.qo_indptr, ragged.qo_indptr, 8, 2, 128, q_data_type=ragged_case.dtype
    )
    wrapper_paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    sglang_begin(wrapper_paged, paged)
    o1, s1 = wrapper_ragged.forward_return_lse(
        ragged.q,
        ragged.k,
        ragged.v,
        causal=True,
        sm_scale=0.1,
        window_left=-1,
        logits_soft_cap=0.0,
    )
    o2, s2 = wrapper_paged.forward_return_lse(
        paged.q,
        (paged.k, paged.v),
        causal=False,
        sm_scale=0.1,
        window_left=-1,
        logits_soft_cap=0.0,
        k_scale=1.0,
        v_scale=1.0,
    )
    out, lse = flashinfer.merge_state(o1, s1, o2, s2)

    whole_case = Case(
        "whole",
        new_lens,
        tuple(a + b for a, b in zip(prefix_lens, new_lens, strict=True)),
        8,
        2,
        128,
        mask=MaskKind.CAUSAL,
    )
    whole = build(whole_case, device=target.device)
    whole.q = paged.q
    begin = 0
    for i in range(3):
        old, new = paged.request(i), ragged.request(i)
        for name in ("k", "v"):
            rows = torch.cat([getattr(old, name), getattr(new, name)])
            getattr(whole, name)[begin : begin + rows.shape[0]] = rows
        begin += whole_case.kv_lens[i]
    expected = reference(whole, pipeline=Pipeline(0.1, True))
    # The partial outputs were rounded once each before the merge.
    expected.spread = expected.spread + expected.out.abs()
    compare(out, lse, expected).check()


def test_sglang_mla_ragged(target):
    case = Case("mla", (37, 100), (37, 100), 4, 4, 192, 128, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend="auto"
    )
    wrapper.begin_forward(
        qo_indptr=inputs.qo_indptr,
        kv_indptr=inputs.kv_indptr,
        num_qo_heads=4,
        num_kv_heads=4,
        head_dim_qk=192,
        head_dim_vo=128,
        q_data_type=case.dtype,
        causal=True,
    )
    out = wrapper.forward(
        inputs.q, inputs.k, inputs.v, causal=True, sm_scale=case.scale, logits_soft_cap=0.0
    )
    runner.compare(inputs, out, None).check()


def test_sglang_multi_item_scoring(target):
    """enable_mis: prefixes, then positions in items for all tokens behind them, padded."""
    inputs = build(SGLANG, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    longest = max(SGLANG.kv_lens)
    prefix = torch.tensor([kv_len // 2 for kv_len in SGLANG.kv_lens])
    tokens = torch.arange(longest).expand(len(prefix), -1) % 7
    sglang_begin(
        wrapper,
        inputs,
        prefix_len_ptr=prefix.to(torch.uint32).to(target.device),
        token_pos_in_items_ptr=tokens.flatten().to(torch.uint16).to(target.device),
        token_pos_in_items_len=longest,
        max_item_len_ptr=torch.full_like(prefix, 6).to(torch.uint16).to(target.device),
    )
    out = wrapper.forward(
        inputs.q, inputs.cache, causal=True, sm_scale=inputs.case.scale, window_left=-1
    )
    inputs.masks = []
    for request, (rows, keys) in enumerate(zip(SGLANG.qo_lens, SGLANG.kv_lens, strict=True)):
        at = torch.arange(keys - rows, keys)[:, None]
        other, first = torch.arange(keys)[None], int(prefix[request])
        own = other > at - tokens[request][(at - first).clamp(min=0)]
        inputs.masks.append((other <= at) & ((at < first) | (other < first) | own))
    inputs.case = dataclasses.replace(inputs.case, mask=MaskKind.CUSTOM, window_left=-1)
    runner.compare(inputs, out, None).check()


def test_huggingface_paged_varlen(target):
    """transformers' continuous batching: packed tokens, padded requests of length zero."""
    case = Case("hf", (12, 0, 1, 0), (40, 0, 77, 0), 8, 2, 64, mask=MaskKind.CAUSAL, window_left=15)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(target.device))
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
