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


def test_pod_example(target):
    """The documented POD example, with a prefill where the documentation has a TODO."""
    device = target.device
    num_layers = layers(target)
    num_qo_heads = 64
    num_kv_heads = 8
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    decode_wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    kv_page_indices = torch.arange(max_num_pages).int().to(device)
    kv_page_indptr = torch.tensor(
        [0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device
    )
    kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    shape = (max_num_pages, 2, page_size, num_kv_heads, head_dim)
    kv_cache_at_layer = [
        torch.randn(shape, dtype=torch.float16, device=device) for _ in range(num_layers)
    ]
    decode_wrapper.plan(
        kv_page_indptr,
        kv_page_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        data_type=torch.float16,
    )
    alone = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer.clone(), "NHD")
    alone.plan(
        kv_page_indptr,
        kv_page_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        data_type=torch.float16,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half().to(device)
        q_p = torch.randn(100, num_qo_heads, head_dim).half().to(device)
        k_p, v_p = torch.randn(2, 300, num_kv_heads, head_dim).half().to(device)
        kv_cache = kv_cache_at_layer[i]
        o_p, o = decode_wrapper.run(q_p, k_p, v_p, q, kv_cache, causal_p=True)
        expected = flashinfer.single_prefill_with_kv_cache(q_p, k_p, v_p, causal=True)
        assert torch.allclose(o_p, expected, rtol=1e-3, atol=1e-3)
        assert torch.allclose(o, alone.run(q, kv_cache), rtol=1e-3, atol=1e-3)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([7, 64, 128])


def test_batch_pod_example(target):
    """The documented example; on the CPU, a sixteenth of the tokens and requests."""
    device = target.device
    fewer = 1 if device == "cuda" else 16
    num_layers = 8 if device == "cuda" else 1
    num_qo_heads = 64
    num_kv_heads = 8
    head_dim = 128
    page_block_size = 1
    causal = True
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    p_qo_lens = [2048 // fewer] * 2
    d_qo_lens = [1] * (128 // fewer)
    p_kv_lens = [2048 // fewer] * 2
    d_kv_lens = [2048 // fewer] * (128 // fewer)
    p_seq_lens_blocks = torch.ceil(
        torch.tensor(p_kv_lens, dtype=torch.int32) / page_block_size
    ).int()
    p_q_indptr = torch.cat([torch.tensor([0]), torch.cumsum(torch.tensor(p_qo_lens), 0)]).int()
    p_kv_indptr = torch.cat([torch.tensor([0]), torch.cumsum(p_seq_lens_blocks, 0)], dim=0).int()
    kv_indices_p = torch.arange(0, p_kv_indptr[-1], device=device, dtype=torch.int32)
    last_page_len_p = (p_seq_lens_blocks - 1) % page_block_size + 1
    d_seq_lens_blocks = torch.ceil(
        torch.tensor(d_kv_lens, dtype=torch.int32) / page_block_size
    ).int()
    d_q_indptr = torch.cat([torch.tensor([0]), torch.cumsum(torch.tensor(d_qo_lens), 0)]).int()
    d_kv_indptr = torch.cat([torch.tensor([0]), torch.cumsum(d_seq_lens_blocks, 0)], dim=0).int()
    kv_indices_d = torch.arange(0, d_kv_indptr[-1], device=device, dtype=torch.int32)
    last_page_len_d = (d_seq_lens_blocks - 1) % page_block_size + 1
    wrapper.plan(
        p_q_indptr.to(device),
        p_kv_indptr.to(device),
        kv_indices_p.to(device),
        last_page_len_p,
        d_q_indptr.to(device),
        d_kv_indptr.to(device),
        kv_indices_d.to(device),
        last_page_len_d,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    dtype = torch.bfloat16
    q_p = torch.rand(p_q_indptr[-1].item(), num_qo_heads, head_dim).to(device, dtype=dtype)
    kv_p = torch.randn(p_kv_indptr[-1], 2, page_block_size, num_kv_heads, head_dim)
    kv_p = kv_p.to(device, dtype=dtype).unbind(1)
    q_d = torch.rand(d_q_indptr[-1].item(), num_qo_heads, head_dim).to(device, dtype=dtype)
    kv_d = torch.randn(d_kv_indptr[-1], 2, page_block_size, num_kv_heads, head_dim)
    kv_d = kv_d.to(device, dtype=dtype).unbind(1)
    for _ in range(num_layers):
        o_p_batch, o_d_batch = wrapper.run(q_p, kv_p, q_d, kv_d, causal_p=causal)
    assert o_p_batch.shape == torch.Size([4096 // fewer, 64, 128])
    assert o_d_batch.shape == torch.Size([128 // fewer, 64, 128])
    n = p_kv_lens[0]
    first = flashinfer.single_prefill_with_kv_cache(
        q_p[:n], kv_p[0][:n, 0], kv_p[1][:n, 0], causal=True
    )
    assert torch.allclose(o_p_batch[:n], first, rtol=2e-2, atol=2e-2)


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
