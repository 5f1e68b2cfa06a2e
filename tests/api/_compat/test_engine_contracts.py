"""Calls of each serving engine other than prefill, argument by argument.

test_serving_calls.py has their prefill calls.
"""

import dataclasses
import functools

import preflash as flashinfer
import pytest
import torch
from preflash.testing import (
    Case,
    KvForm,
    MaskKind,
    Sinks,
    build,
    compare,
    poison,
    reference,
    runner,
)
from preflash.testing.oracle import Pipeline

DECODES = Case("decodes", (1,) * 4, (90, 17, 1, 333), 8, 2, 128, page_size=16, form=KvForm.HALVES)
SLOTS = dataclasses.replace(DECODES, name="slots", page_size=1, form=KvForm.FLAT)
CHUNKS = Case(
    "chunks", (1, 40, 9), (90, 40, 129), 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL
)  # fmt: skip


def on_host(inputs) -> tuple:
    return inputs.kv_indptr.cpu(), inputs.indices, inputs.last_page_len.cpu()


# vLLM


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_vllm_decode(target, layout):
    """Planned by fast_decode_plan after the first time; q in a bucket that is larger."""
    case = dataclasses.replace(DECODES, layout=layout)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), layout, use_tensor_cores=True
    )
    options = {
        "pos_encoding_mode": "NONE",
        "sm_scale": case.scale,
        "window_left": -1,
        "logits_soft_cap": None,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype,
        "fixed_split_size": -1,
        "disable_split_kv": False,
    }
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
    indptr, indices, last = on_host(inputs)
    arrays = {"indptr": indptr, "indices": indices, "last_page_len": last}
    for plan in (wrapper.plan, functools.partial(flashinfer.decode.fast_decode_plan, wrapper)):
        plan(**arrays, **heads, **options)
        assert wrapper._window_left == -1
        assert wrapper._logits_soft_cap == 0.0
        assert wrapper._sm_scale == case.scale
        q = torch.cat([inputs.q, poison((2, 8, 128), case.dtype, target.device)])
        out = poison(q.shape, case.dtype, target.device)
        wrapper.run(q[:4], (inputs.k, inputs.v), q_scale=1.0, k_scale=1.0, v_scale=1.0, out=out[:4])
        runner.compare(inputs, out[:4], None).check()


def test_vllm_sinks(target):
    case = dataclasses.replace(CHUNKS, sinks=Sinks.ORDINARY, window_left=31)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        runner.workspace(target.device),
        "NHD",
        backend="auto",
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
        head_dim_qk=128,
        head_dim_vo=128,
        window_left=31,
    )
    indptr, indices, last = on_host(inputs)
    wrapper.plan(
        qo_indptr=inputs.qo_indptr.cpu(),
        paged_kv_indptr=indptr,
        paged_kv_indices=indices,
        paged_kv_last_page_len=last,
        seq_lens=torch.tensor(case.kv_lens, dtype=torch.int32),
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=128,
        page_size=16,
        causal=True,
        sm_scale=case.scale,
        window_left=31,
        logits_soft_cap=None,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
        o_data_type=case.dtype,
        fixed_split_size=-1,
        disable_split_kv=False,
    )
    out = poison(inputs.q.shape, case.dtype, target.device)
    wrapper.run(
        inputs.q, (inputs.k, inputs.v), inputs.sinks, case.scale * 1.0 * 0.5, v_scale=2.0, out=out
    )
    pipeline = Pipeline(case.scale * 0.5, True, 31, out_scale=2.0, sinks=inputs.sinks)
    compare(out, None, reference(inputs, pipeline=pipeline)).check()


def test_vllm_lengths_of_a_page_table(target):
    inputs = build(DECODES, device=target.device)
    lengths = flashinfer.get_seq_lens(inputs.kv_indptr, inputs.last_page_len, 16)
    assert lengths.tolist() == list(DECODES.kv_lens)


# SGLang


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("fast", [False, True])
def test_sglang_decode(target, cap, fast):
    """begin_forward() every step, cap and scale at forward() only; page_size 1, spare indices."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", use_tensor_cores=fast
    )
    if fast:
        wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    for seed in range(2):
        inputs = build(SLOTS, device=target.device, seed=seed)
        spare = torch.zeros(256, dtype=torch.int32, device=target.device)
        wrapper.begin_forward(
            inputs.kv_indptr,
            torch.cat([inputs.indices, spare]),
            inputs.last_page_len,
            8,
            2,
            128,
            1,
            data_type=SLOTS.dtype,
            q_data_type=SLOTS.dtype,
            non_blocking=True,
            fixed_split_size=None,
            disable_split_kv=False,
            **({"global_override_indptr_cpu": inputs.kv_indptr.cpu()} if fast else {}),
        )
        out = wrapper.forward(
            inputs.q,
            (inputs.k, inputs.v),
            sm_scale=0.1,
            logits_soft_cap=cap,
            k_scale=1.5,
            v_scale=0.5,
        )
        pipeline = Pipeline(0.15, False, -1, cap, out_scale=0.5)
        compare(out, None, reference(inputs, pipeline=pipeline), soft_cap=cap).check()


def test_sglang_tree_mask_in_a_longer_buffer(target):
    """EAGLE: the mask of a step lies in a preallocated buffer."""
    case = Case("tree", (5, 5), (60, 33), 8, 2, 128, page_size=1, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    buffer = torch.ones(4096, dtype=torch.bool, device=target.device)
    buffer[: inputs.custom_mask.numel()] = inputs.custom_mask
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", backend=target.backend
    )
    wrapper.begin_forward(
        inputs.qo_indptr,
        inputs.kv_indptr,
        inputs.indices,
        inputs.last_page_len,
        8,
        2,
        128,
        1,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
        custom_mask=buffer,
        non_blocking=True,
    )
    out = wrapper.forward(
        inputs.q, (inputs.k, inputs.v), causal=False, sm_scale=case.scale, window_left=-1
    )
    runner.compare(inputs, out, None).check()


# TensorRT-LLM


def test_tensorrt_llm_append_then_prefill_and_decode(target):
    """One metadata object: tokens appended, contexts and generations planned out of one table."""
    case = Case("trt", (20, 8, 1, 1), (20, 40, 50, 17), 8, 2, 128, page_size=16)
    inputs = build(case, device=target.device)
    pool = torch.stack([inputs.k, inputs.v], 1)
    new = [inputs.request(i) for i in range(4)]
    k, v = (
        torch.cat([getattr(r, n)[-r.q.shape[0] :] for r in new]).contiguous() for n in ("k", "v")
    )
    for i, r in enumerate(new):  # the pool has what came before alone
        first = r.k.shape[0] - r.q.shape[0]
        for position in range(first, r.k.shape[0]):
            pool[inputs.page_table[i][position // 16], :, position % 16] = float("nan")
    lengths = flashinfer.get_seq_lens(inputs.kv_indptr, inputs.last_page_len, 16)
    indices, positions = flashinfer.get_batch_indices_positions(
        inputs.qo_indptr, lengths, k.shape[0]
    )
    flashinfer.page.append_paged_kv_cache(
        append_key=k,
        append_value=v,
        batch_indices=indices,
        positions=positions,
        paged_kv_cache=pool,
        kv_indices=inputs.indices,
        kv_indptr=inputs.kv_indptr,
        kv_last_page_len=inputs.last_page_len,
        kv_layout="NHD",
    )
    buffers = {
        "qo_indptr_buf": torch.zeros(3, dtype=torch.int32, device=target.device),
        "paged_kv_indptr_buf": torch.zeros(3, dtype=torch.int32, device=target.device),
        "paged_kv_indices_buf": torch.zeros(64, dtype=torch.int32, device=target.device),
        "paged_kv_last_page_len_buf": torch.zeros(2, dtype=torch.int32, device=target.device),
    }
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device),
        "NHD",
        backend=target.backend,
        use_cuda_graph=False,
        **buffers,
    )
    prefill.plan(
        inputs.qo_indptr[:3],
        inputs.kv_indptr[:3],
        inputs.indices,
        inputs.last_page_len[:2],
        8,
        2,
        128,
        16,
        causal=True,
        sm_scale=case.scale,
        window_left=-1,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device),
        "NHD",
        use_cuda_graph=False,
        use_tensor_cores=True,
        backend=target.backend,
    )
    decode.plan(
        inputs.kv_indptr[2:],
        inputs.indices,
        inputs.last_page_len[2:],
        8,
        2,
        128,
        16,
        sm_scale=case.scale,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    out = poison(inputs.q.shape, case.dtype, target.device)
    prefill.run(inputs.q[:28], pool, out=out[:28])
    decode.run(inputs.q[28:], pool, out=out[28:])
    pipeline = Pipeline(case.scale, True)
    compare(out, None, reference(inputs, pipeline=pipeline)).check()


# TGI


def test_tgi_prefill_and_decode(target):
    inputs = build(CHUNKS, device=target.device)
    state = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=runner.workspace(target.device),
        kv_layout="NHD",
        use_cuda_graph=False,
    )
    for _ in range(2):
        state.begin_forward(
            qo_indptr=inputs.qo_indptr,
            paged_kv_indptr=inputs.kv_indptr,
            paged_kv_indices=inputs.indices,
            paged_kv_last_page_len=inputs.last_page_len,
            custom_mask=None,
            num_qo_heads=8,
            num_kv_heads=2,
            head_dim=128,
            kv_data_type=CHUNKS.dtype,
            q_data_type=CHUNKS.dtype,
            page_size=16,
            window_left=-1,
        )
        out = state.forward(
            inputs.q,
            causal=True,
            paged_kv_cache=(inputs.k, inputs.v),
            logits_soft_cap=30.0,
            sm_scale=0.1,
            k_scale=1.0,
            v_scale=1.0,
        )
        state.end_forward()
        pipeline = Pipeline(0.1, True, -1, 30.0)
        compare(out, None, reference(inputs, pipeline=pipeline), soft_cap=30.0).check()

    inputs = build(DECODES, device=target.device)
    state = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        float_workspace_buffer=runner.workspace(target.device),
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=True,
    )
    state.begin_forward(
        indptr=inputs.kv_indptr,
        indices=inputs.indices,
        last_page_len=inputs.last_page_len,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=16,
        data_type=DECODES.dtype,
        q_data_type=DECODES.dtype,
        window_left=-1,
    )
    out = state.forward(
        inputs.q, paged_kv_cache=(inputs.k, inputs.v), logits_soft_cap=None, sm_scale=0.1
    )
    compare(out, None, reference(inputs, pipeline=Pipeline(0.1))).check()


# RTP-LLM


def test_rtp_llm_head_dim_vo_by_position(target):
    inputs = build(CHUNKS, device=target.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(runner.workspace(target.device), "NHD")
    wrapper.plan(
        inputs.qo_indptr,
        inputs.kv_indptr,
        inputs.indices,
        inputs.last_page_len,
        8,
        2,
        128,
        16,
        128,
        causal=True,
        q_data_type=CHUNKS.dtype,
    )
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache, return_lse=True)).check()


def test_every_import_of_the_engines():
    from preflash import (  # noqa: F401
        BatchAttentionWithAttentionSinkWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
        append_paged_kv_cache,
        fast_decode_plan,
        get_batch_indices_positions,
        get_seq_lens,
        single_decode_with_kv_cache,
    )
    from preflash.cascade import merge_state  # noqa: F401
    from preflash.decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper  # noqa: F401
