"""Parameters of the calls beside prefill: what later releases of the API have, in their order."""

from __future__ import annotations

import inspect

import preflash
import pytest

CONTEXT = (
    "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale "
    "bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv window_left=-1 out=None out_dtype=None "
    "o_sf_scale=None o_sf_vec_size=None kv_layout='HND' enable_pdl=None sinks=None "
    "kv_cache_sf=None skip_softmax_threshold_scale_factor=None uses_shared_paged_kv_idx=True "
    "causal=True lse=None return_lse=False multi_ctas_kv_counter_buffer=None "
    "use_fp16_softmax=None uses_spcompress=None backend='auto'"
)
DECODE = (
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 "
    "bmm2_scale=1.0 window_left=-1 out=None out_dtype=None o_sf_scale=None o_sf_vec_size=None "
    "sinks=None kv_layout='HND' enable_pdl=None backend='auto' q_len_per_req=1 o_scale=1.0 "
    "mask=None max_q_len=None cum_seq_lens_q=None skip_softmax_threshold_scale_factor=None "
    "kv_cache_sf=None uses_shared_paged_kv_idx=True lse=None return_lse=False "
    "bmm1_scale_log2=None multi_ctas_kv_counter_buffer=None enable_block_sparse_attention=False "
    "cp_world=1 cp_rank=0 causal_seqlens_kv_global=None bf16q_fp8kv_transform_mode=None "
    "request_order=None request_order_plan=None"
)
CUDNN_DECODE = (
    "q k_cache v_cache scale workspace_buffer * max_sequence_kv actual_seq_lens_kv=None "
    "block_tables=None is_cuda_graph_compatible=False batch_offsets_q=None batch_offsets_o=None "
    "batch_offsets_k=None batch_offsets_v=None out=None return_lse=False lse=None q_len_per_req=1 "
    "window_left=-1 sinks=None backend=None"
)
VARLEN = (
    "q k v qo_segment_offsets kv_segment_offsets plan_info=None max_qo_len=None out=None lse=None "
    "causal=False sm_scale=None q_scale=None k_scale=None v_scale=None o_scale=None "
    "return_lse=False * backend='auto'"
)
ENCODING = (
    "pos_encoding_mode='NONE' use_fp16_qk_reduction=False logits_soft_cap=None sm_scale=None "
    "rope_scale=None rope_theta=None"
)
SPARSE_PLAN = (
    "indptr indices M N R C num_qo_heads num_kv_heads head_dim mask=None packed_mask=None "
    f"causal=False {ENCODING} q_data_type='float16' kv_data_type=None o_data_type='float16' "
    "non_blocking=True block_mask=None kv_block_lens=None q2k_indices=None q2k_num=None "
    "kv_splits=None use_clc=None q_scale=None k_scale=None v_scale=None"
)
VARIABLE_PLAN = (
    "block_mask_map block_row_sz block_col_sz num_qo_heads num_kv_heads head_dim causal=False "
    f"{ENCODING} non_blocking=True q_data_type='float16' kv_data_type=None"
)
TABLE = "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len"
RANGES_PLAN = (
    f"{TABLE} num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo=None custom_mask=None "
    "packed_custom_mask=None causal=False pos_encoding_mode='NONE' use_fp16_qk_reduction=False "
    "sm_scale=None window_left=-1 logits_soft_cap=None q_data_type=None kv_data_type=None "
    "o_data_type=None {}prefix_len_ptr=None token_pos_in_items_ptr=None "
    "token_pos_in_items_len=0 max_item_len_ptr=None max_token_per_sequence=None "
    "max_sequence_kv=None fixed_split_size=None disable_split_kv=False"
    " batch_invariant=False"
)
RANGES_RUN = (
    "q paged_kv_cache bidirectional_ranges causal_window_left=-1 range_window_left=-1 "
    "q_scale=None k_scale=None v_scale=None {}enable_pdl=None kv_cache_sf=None"
)
RANGES_INIT = (
    "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None "
    "paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None "
    "pos_encoding_mode='NONE' q_data_type=torch.bfloat16 kv_data_type=torch.bfloat16 "
    "o_data_type=None head_dim_qk=128 head_dim_vo=128 * backend='auto'"
)
MIXED_PLAN = (
    "qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk head_dim_vo "
    "page_size causal=False sm_scale=None logits_soft_cap=None q_data_type=torch.bfloat16 "
    "kv_data_type=torch.bfloat16 use_profiler=False * seq_lens=None "
    "lengths_are_upper_bounds=False batch_invariant=False"
)
MIXED_RUN = (
    "q kv_cache out=None lse=None k_scale=None v_scale=None logits_soft_cap=0.0 "
    "profiler_buffer=None kv_cache_sf=None"
)
MIXED, RANGES = preflash.BatchAttention, preflash.BatchPrefillWithCausalBidirectionalRangesWrapper
SPARSE = preflash.BlockSparseAttentionWrapper
VARIABLE = preflash.VariableBlockSparseAttentionWrapper
RESULTS = "out=None lse=None return_lse=False "
SIGNATURES = {
    "context": (preflash.trtllm_batch_context_with_kv_cache, CONTEXT),
    "decode": (preflash.trtllm_batch_decode_with_kv_cache, DECODE),
    "cudnn": (preflash.cudnn_batch_decode_with_kv_cache, CUDNN_DECODE),
    "varlen": (preflash.fmha_varlen, VARLEN),
    "sparse": (SPARSE.__init__, "float_workspace_buffer backend='auto'"),
    "sparse plan": (SPARSE.plan, SPARSE_PLAN),
    "sparse begin_forward": (SPARSE.begin_forward, SPARSE_PLAN),
    "sparse run": (
        SPARSE.run,
        f"q k v scale_q=None scale_k=None scale_v=None {RESULTS}enable_pdl=None",
    ),
    "sparse forward": (
        SPARSE.forward,
        f"q k v scale_q=None scale_k=None scale_v=None {ENCODING}",
    ),
    "variable": (VARIABLE.__init__, "float_workspace_buffer backend='auto'"),
    "variable plan": (VARIABLE.plan, VARIABLE_PLAN),
    "variable run": (VARIABLE.run, f"q k v {RESULTS}enable_pdl=None"),
    "variable forward": (VARIABLE.forward, f"q k v {ENCODING}"),
    "ranges": (RANGES.__init__, RANGES_INIT),
    "ranges plan": (RANGES.plan, RANGES_PLAN.format("non_blocking=True ")),
    "ranges workspace_size": (RANGES.workspace_size, RANGES_PLAN.format("")),
    "ranges run": (RANGES.run, RANGES_RUN.format(RESULTS)),
    "ranges forward": (RANGES.forward, RANGES_RUN.format("")),
    "ranges forward_return_lse": (RANGES.forward_return_lse, RANGES_RUN.format("")),
    "mixed": (MIXED.__init__, "kv_layout='NHD' device='cuda' * backend='auto'"),
    "mixed plan": (MIXED.plan, MIXED_PLAN),
    "mixed run": (MIXED.run, MIXED_RUN),
}


def spelled(function) -> str:
    words, by_name = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            words.append("*")
            by_name = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(parameter.name + default)
    return " ".join(words).removeprefix("self ")


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES.values(), ids=SIGNATURES)
def test_parameters(function, parameters):
    assert spelled(function) == parameters


@pytest.mark.parametrize(("function", "_"), SIGNATURES.values(), ids=SIGNATURES)
def test_documented(function, _):
    if function.__name__ != "__init__":
        assert inspect.getdoc(function)


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "attention": [MIXED, RANGES],
        "sparse": [SPARSE, VARIABLE],
        "prefill": [preflash.fmha_varlen, preflash.trtllm_batch_context_with_kv_cache],
        "cudnn": [preflash.cudnn_batch_decode_with_kv_cache],
        "decode": [
            preflash.cudnn_batch_decode_with_kv_cache,
            preflash.trtllm_batch_decode_with_kv_cache,
        ],
    }.items(),
)
def test_where_names_live(module, names):
    for one in names:
        assert getattr(getattr(preflash, module), one.__name__) is one
        assert one.__name__ in getattr(preflash, module).__all__
        assert one.__name__ in preflash.__all__


@pytest.mark.parametrize("name", ["cutlass", "trtllm-gen", "cute-dsl", "xqa"])
def test_backends_of_other_packages(name, monkeypatch):
    import torch

    make = preflash.BatchPrefillWithRaggedKVCacheWrapper
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{name}.*PREFLASH_BACKEND=auto in the environment"):
        make(buffer, backend=name)
    monkeypatch.setenv("PREFLASH_BACKEND", "auto")
    assert f"PREFLASH_BACKEND=auto instead of '{name}'" in repr(make(buffer, backend=name))
