"""The examples of the documentation, statement by statement, on the device that is there.

`num_layers` is smaller on the CPU; everything else is as documented.
"""

import preflash as flashinfer
import torch


def layers(target) -> int:
    return 32 if target.device == "cuda" else 2


def test_paged_example(target):
    device = target.device
    num_layers = layers(target)
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    paged_kv_indices = torch.arange(max_num_pages).int().to(device)
    paged_kv_indptr = torch.tensor(
        [0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device
    )
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(device)
    kv_cache_at_layer = torch.randn(
        num_layers,
        max_num_pages,
        2,
        page_size,
        num_kv_heads,
        head_dim,
        dtype=torch.float16,
        device=device,
    )
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, 64, 128])

    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (
        (page_size * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len)
        .cpu()
        .tolist()
    )
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device=device),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        custom_mask=mask,
    )
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)


def test_ragged_example(target):
    device = target.device
    num_layers = layers(target)
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    kv_indptr = qo_indptr.clone()
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(device)
    k_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(device)
    v_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(device)
    prefill_wrapper.plan(
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, 64, 128])

    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device=device),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, custom_mask=mask
    )
    outputs_custom_mask = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        o_custom = prefill_wrapper.run(q, k, v)
        outputs_custom_mask.append(o_custom)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)
    assert outputs_custom_mask[0].shape == torch.Size([100, 64, 128])


def test_single_example(target):
    device = target.device
    qo_len = 128
    kv_len = 4096
    num_qo_heads = 32
    num_kv_heads = 4
    head_dim = 128
    q = torch.randn(qo_len, num_qo_heads, head_dim).half().to(device)
    k = torch.randn(kv_len, num_kv_heads, head_dim).half().to(device)
    v = torch.randn(kv_len, num_kv_heads, head_dim).half().to(device)
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, allow_fp16_qk_reduction=True)
    assert o.shape == torch.Size([128, 32, 128])
    mask = torch.tril(
        torch.full((qo_len, kv_len), True, device=device),
        diagonal=(kv_len - qo_len),
    )
    o_custom = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)


def test_examples_compute_attention(target):
    """The examples check shapes and agreement; this checks the paged example's numbers."""
    from preflash.testing import Case, KvForm, MaskKind, build, runner

    pages, last = [17, 12, 15, 4, 18, 34, 28], [1, 7, 14, 4, 3, 1, 16]
    case = Case(
        "example",
        (33, 11, 11, 11, 11, 11, 12),
        tuple(16 * (n - 1) + m for n, m in zip(pages, last, strict=True)),
        64,
        16,
        128,
        dtype=torch.float16,
        page_size=16,
        form=KvForm.COMBINED,
        mask=MaskKind.CAUSAL,
    )
    runner.check(build(case, device=target.device), backend="auto")


def test_compiled_example(target):
    num_qo_heads, num_kv_heads, head_dim, page_size = 4, 2, 64, 16
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    w_q = torch.randn(96, num_qo_heads * head_dim, device=target.device).half()
    w_o = torch.randn(num_qo_heads * head_dim, 96, device=target.device).half() / 16
    caches = torch.randn(2, 12, page_size, num_kv_heads, head_dim, device=target.device).half()
    k_cache, v_cache = caches
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=counted)
    def attend(x, k_cache, v_cache):
        q = (x @ w_q).view(-1, num_qo_heads, head_dim)
        return wrapper.run(q, (k_cache, v_cache)).flatten(1) @ w_o

    for kv_len in (30, 170):
        qo_indptr = torch.tensor([0, 3, 9], dtype=torch.int32)
        pages = -(-kv_len // page_size)
        wrapper.plan(
            qo_indptr,
            torch.tensor([0, 1, 1 + pages], dtype=torch.int32),
            torch.arange(1 + pages, dtype=torch.int32),
            torch.tensor([7, (kv_len - 1) % page_size + 1], dtype=torch.int32),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )
        x = torch.randn(9, 96, device=target.device).half()
        o = attend(x, k_cache, v_cache)
        q = (x @ w_q).view(-1, num_qo_heads, head_dim)
        expected = wrapper.run(q, (k_cache, v_cache)).flatten(1) @ w_o
        assert torch.equal(o, expected)
    assert len(graphs) == 1
