"""Examples of FlashInfer's documentation run as documented, on the CPU with fewer layers."""

import preflash as flashinfer
import pytest
import torch

MAX_NUM_PAGES, PAGE_SIZE = 128, 16
QO_INDPTR = [0, 33, 44, 55, 66, 77, 88, 100]
PAGES = [0, 17, 29, 44, 48, 66, 100, 128]
LAST_PAGE_LEN = [1, 7, 14, 4, 3, 1, 16]


@pytest.fixture
def num_layers(target):
    return 32 if target.device == "cuda" else 2


@pytest.fixture
def workspace(target):
    return torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=target.device)


def ints(target, *lists):
    return [torch.tensor(numbers, dtype=torch.int32, device=target.device) for numbers in lists]


def halves(target, *shape):
    return torch.randn(*shape).half().to(target.device)


def close(got, expected, tolerance=1e-3):
    assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


def causal_mask(qo_indptr, kv_lens, device):
    """Returns the flat custom mask that means causal."""
    parts = []
    for qo_len, kv_len in zip((qo_indptr[1:] - qo_indptr[:-1]).tolist(), kv_lens, strict=True):
        full = torch.full((qo_len, kv_len), True, device=device)
        parts.append(torch.tril(full, diagonal=kv_len - qo_len).flatten())
    return torch.cat(parts, dim=0)


def test_paged_example(target, num_layers, workspace):
    num_qo_heads, num_kv_heads, head_dim = 64, 16, 128
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    qo_indptr, paged_kv_indptr, paged_kv_last_page_len = ints(
        target, QO_INDPTR, PAGES, LAST_PAGE_LEN
    )
    paged_kv_indices = torch.arange(MAX_NUM_PAGES).int().to(target.device)
    table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
    sizes = (num_qo_heads, num_kv_heads, head_dim, PAGE_SIZE)
    q_at_layer = halves(target, num_layers, 100, num_qo_heads, head_dim)
    shape = (num_layers, MAX_NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, head_dim)
    kv_cache_at_layer = halves(target, *shape)
    prefill_wrapper.plan(*table, *sizes, causal=True)
    outputs = []
    for q, kv_cache in zip(q_at_layer, kv_cache_at_layer, strict=True):
        outputs.append(prefill_wrapper.run(q, kv_cache))
    assert outputs[0].shape == torch.Size([100, 64, 128])
    kv_lens = PAGE_SIZE * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len
    mask = causal_mask(qo_indptr, kv_lens.tolist(), target.device)
    prefill_wrapper.plan(*table, *sizes, custom_mask=mask)
    for q, kv_cache, o in zip(q_at_layer, kv_cache_at_layer, outputs, strict=True):
        close(prefill_wrapper.run(q, kv_cache), o)


def test_ragged_example(target, num_layers, workspace):
    num_qo_heads, num_kv_heads, head_dim = 64, 16, 128
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    (qo_indptr,) = ints(target, QO_INDPTR)
    kv_indptr = qo_indptr.clone()
    q_at_layer = halves(target, num_layers, 100, num_qo_heads, head_dim)
    k_at_layer, v_at_layer = (
        halves(target, num_layers, 100, num_kv_heads, head_dim) for _ in range(2)
    )
    heads = (num_qo_heads, num_kv_heads, head_dim)
    prefill_wrapper.plan(qo_indptr, kv_indptr, *heads, causal=True)
    layers = list(zip(q_at_layer, k_at_layer, v_at_layer, strict=True))
    outputs = [prefill_wrapper.run(q, k, v) for q, k, v in layers]
    assert outputs[0].shape == torch.Size([100, 64, 128])
    mask = causal_mask(qo_indptr, (kv_indptr[1:] - kv_indptr[:-1]).tolist(), target.device)
    prefill_wrapper.plan(qo_indptr, kv_indptr, *heads, custom_mask=mask)
    for (q, k, v), o in zip(layers, outputs, strict=True):
        close(prefill_wrapper.run(q, k, v), o)


def test_single_example(target):
    qo_len, kv_len, num_qo_heads, num_kv_heads, head_dim = 128, 4096, 32, 4, 128
    q = halves(target, qo_len, num_qo_heads, head_dim)
    k, v = (halves(target, kv_len, num_kv_heads, head_dim) for _ in range(2))
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, allow_fp16_qk_reduction=True)
    assert o.shape == torch.Size([128, 32, 128])
    mask = torch.full((qo_len, kv_len), True, device=target.device).tril(diagonal=kv_len - qo_len)
    close(flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask), o)


def test_pod_example(target, num_layers, workspace):
    """The documented POD example, with a prefill where the documentation has a TODO."""
    num_qo_heads, num_kv_heads, head_dim, batch_size = 64, 8, 128, 7
    decode_wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace, "NHD")
    kv_page_indptr, kv_last_page_len = ints(target, PAGES, LAST_PAGE_LEN)
    kv_page_indices = torch.arange(MAX_NUM_PAGES).int().to(target.device)
    table = (kv_page_indptr, kv_page_indices, kv_last_page_len)
    sizes = (num_qo_heads, num_kv_heads, head_dim, PAGE_SIZE)
    decode_wrapper.plan(*table, *sizes, pos_encoding_mode="NONE", data_type=torch.float16)
    alone = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace.clone(), "NHD")
    alone.plan(*table, *sizes, data_type=torch.float16)
    for _ in range(num_layers):
        q = halves(target, batch_size, num_qo_heads, head_dim)
        q_p = halves(target, 100, num_qo_heads, head_dim)
        k_p, v_p = halves(target, 2, 300, num_kv_heads, head_dim)
        kv_cache = halves(target, MAX_NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, head_dim)
        o_p, o = decode_wrapper.run(q_p, k_p, v_p, q, kv_cache, causal_p=True)
        close(o_p, flashinfer.single_prefill_with_kv_cache(q_p, k_p, v_p, causal=True))
        close(o, alone.run(q, kv_cache))
        assert o.shape == torch.Size([7, 64, 128])
