"""Public calls have the documented parameters, in FlashInfer's order and with its defaults."""

import inspect

import preflash
import pytest

PAGED, RAGGED = (
    getattr(preflash, f"BatchPrefillWith{k}KVCacheWrapper") for k in ("Paged", "Ragged")
)
MIXED, RANGES = preflash.BatchAttention, preflash.BatchPrefillWithCausalBidirectionalRangesWrapper
SPARSE, VARIABLE = (
    preflash.BlockSparseAttentionWrapper,
    preflash.VariableBlockSparseAttentionWrapper,
)

# Each text has the positional parameters, "*", and the parameters by name; one that ends with "..."
# names a part of the latter, in any order and without defaults.
TABLE = "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len"
INIT = "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None "
PAGED_BUFFERS = (
    "paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None "
)
MASK_BUFFERS = "custom_mask_buf=None qk_indptr_buf=None backend='auto' * mask_indptr_buf ..."
MASKS = "custom_mask=None packed_custom_mask=None causal=False "
OLDER_ENCODING = "pos_encoding_mode='NONE' allow_fp16_qk_reduction=False "
ROPE = "rope_scale=None rope_theta=None"
PLAN_BY_NAME = (
    "* head_dim_qk head_dim_vo use_fp16_qk_reduction o_data_type fixed_split_size disable_split_kv "
    "seq_lens seq_lens_q max_token_per_sequence max_sequence_kv uniform_q_len ..."
)
PAGED_PLAN = (
    f"{TABLE} num_qo_heads num_kv_heads head_dim page_size {MASKS}{OLDER_ENCODING}sm_scale=None "
    f"window_left=-1 logits_soft_cap=None {ROPE} q_data_type='float16' kv_data_type=None "
    f"non_blocking=True {PLAN_BY_NAME}"
)
# The window and the cap precede the scale, the reverse of the paged order.
RAGGED_PLAN = (
    f"qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim {MASKS}{OLDER_ENCODING}window_left=-1 "
    f"logits_soft_cap=None sm_scale=None {ROPE} q_data_type='float16' kv_data_type=None "
    f"{PLAN_BY_NAME}"
)
RUN_BY_NAME = "out lse lse_base lse_layout q_scale enable_pdl window_left sinks ..."
SINGLE = (
    f"q k v {MASKS}kv_layout='NHD' {OLDER_ENCODING}sm_scale=None window_left=-1 "
    f"logits_soft_cap=None {ROPE} * return_lse ..."
)
RESET = "float_workspace_buffer int_workspace_buffer"

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
    f"{ROPE}"
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
RANGES_PLAN = (
    f"{TABLE} num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo=None {MASKS}"
    "pos_encoding_mode='NONE' use_fp16_qk_reduction=False sm_scale=None window_left=-1 "
    "logits_soft_cap=None q_data_type=None kv_data_type=None o_data_type=None {}"
    "prefix_len_ptr=None token_pos_in_items_ptr=None token_pos_in_items_len=0 "
    "max_item_len_ptr=None max_token_per_sequence=None max_sequence_kv=None "
    "fixed_split_size=None disable_split_kv=False batch_invariant=False"
)
RANGES_RUN = (
    "q paged_kv_cache bidirectional_ranges causal_window_left=-1 range_window_left=-1 "
    "q_scale=None k_scale=None v_scale=None {}enable_pdl=None kv_cache_sf=None"
)
RANGES_INIT = (
    f"{INIT}{PAGED_BUFFERS}pos_encoding_mode='NONE' q_data_type=torch.bfloat16 "
    "kv_data_type=torch.bfloat16 o_data_type=None head_dim_qk=128 head_dim_vo=128 * backend='auto'"
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
RESULTS = "out=None lse=None return_lse=False "
SPARSE_SCALES = "scale_q=None scale_k=None scale_v=None "
SIGNATURES = [
    (PAGED.__init__, f"{INIT}{PAGED_BUFFERS}{MASK_BUFFERS}"),
    (PAGED.plan, PAGED_PLAN),
    (PAGED.begin_forward, PAGED_PLAN),
    (PAGED.run, f"q paged_kv_cache k_scale=None v_scale=None return_lse=False * {RUN_BY_NAME}"),
    (PAGED.reset_workspace_buffer, RESET),
    (RAGGED.__init__, f"{INIT}kv_indptr_buf=None {MASK_BUFFERS}"),
    (RAGGED.plan, RAGGED_PLAN),
    (RAGGED.begin_forward, RAGGED_PLAN),
    (RAGGED.run, f"q k v return_lse=False * k_scale v_scale {RUN_BY_NAME}"),
    (preflash.single_prefill_with_kv_cache, SINGLE),
    (preflash.single_prefill_with_kv_cache_return_lse, SINGLE),
    (preflash.packbits, "x bitorder='big'"),
    (preflash.segment_packbits, "x indptr bitorder='big'"),
    (preflash.trtllm_batch_context_with_kv_cache, CONTEXT),
    (preflash.trtllm_batch_decode_with_kv_cache, DECODE),
    (preflash.cudnn_batch_decode_with_kv_cache, CUDNN_DECODE),
    (preflash.fmha_varlen, VARLEN),
    (SPARSE.__init__, "float_workspace_buffer backend='auto'"),
    (SPARSE.plan, SPARSE_PLAN),
    (SPARSE.begin_forward, SPARSE_PLAN),
    (SPARSE.run, f"q k v {SPARSE_SCALES}{RESULTS}enable_pdl=None"),
    (SPARSE.forward, f"q k v {SPARSE_SCALES}{ENCODING}"),
    (VARIABLE.__init__, "float_workspace_buffer backend='auto'"),
    (VARIABLE.plan, VARIABLE_PLAN),
    (VARIABLE.run, f"q k v {RESULTS}enable_pdl=None"),
    (VARIABLE.forward, f"q k v {ENCODING}"),
    (RANGES.__init__, RANGES_INIT),
    (RANGES.plan, RANGES_PLAN.format("non_blocking=True ")),
    (RANGES.workspace_size, RANGES_PLAN.format("")),
    (RANGES.run, RANGES_RUN.format(RESULTS)),
    (RANGES.forward, RANGES_RUN.format("")),
    (RANGES.forward_return_lse, RANGES_RUN.format("")),
    (MIXED.__init__, "kv_layout='NHD' device='cuda' * backend='auto'"),
    (MIXED.plan, MIXED_PLAN),
    (MIXED.run, MIXED_RUN),
]


def spelled(function) -> str:
    words, by_name = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL) and not by_name:
            words.append("*")
            by_name = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        if parameter.kind is not parameter.VAR_POSITIONAL:
            words.append(parameter.name + default)
    return " ".join(words).removeprefix("self ")


@pytest.mark.parametrize(
    ("function", "parameters"), SIGNATURES, ids=[f.__qualname__ for f, _ in SIGNATURES]
)
def test_parameters(function, parameters):
    assert function.__name__ == "__init__" or inspect.getdoc(function)
    if not parameters.endswith(" ..."):
        assert spelled(function) == parameters
        return
    positional, _, by_name = spelled(function).partition(" * ")
    wanted, _, names = parameters.removesuffix(" ...").partition(" * ")
    assert positional == wanted
    assert set(names.split()) <= {word.partition("=")[0] for word in by_name.split()}


def test_the_default_of_return_lse():
    for name, default in (("", False), ("_return_lse", True)):
        function = getattr(preflash, f"single_prefill_with_kv_cache{name}")
        assert inspect.signature(function).parameters["return_lse"].default is default


@pytest.mark.parametrize("wrapper", [PAGED, RAGGED])
def test_workspace_size_takes_what_plan_takes(wrapper):
    plan, size = (
        set(inspect.signature(f).parameters) for f in (wrapper.plan, wrapper.workspace_size)
    )
    assert plan - {"non_blocking"} == size - {"non_blocking"}
    for name in ("run_return_lse", "forward", "forward_return_lse", "end_forward"):
        assert callable(getattr(wrapper, name)), name


HOMES = {
    "attention": "BatchAttention BatchAttentionWithAttentionSinkWrapper "
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "cascade": "merge_state merge_state_in_place merge_states MultiLevelCascadeAttentionWrapper",
    "cudnn": "cudnn_batch_decode_with_kv_cache",
    "decode": "BatchDecodeWithPagedKVCacheWrapper CUDAGraphBatchDecodeWithPagedKVCacheWrapper "
    "single_decode_with_kv_cache fast_decode_plan cudnn_batch_decode_with_kv_cache "
    "trtllm_batch_decode_with_kv_cache",
    "page": "append_paged_kv_cache get_batch_indices_positions get_seq_lens",
    "prefill": "single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse fmha_varlen "
    "BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper "
    "trtllm_batch_context_with_kv_cache",
    "quantization": "packbits segment_packbits",
    "sparse": "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper",
}


@pytest.mark.parametrize(("home", "names"), HOMES.items())
def test_names_live_in_their_module_and_on_top(home, names):
    module = getattr(preflash, home)
    for name in names.split():
        assert getattr(module, name) is getattr(preflash, name)
        assert inspect.getdoc(getattr(module, name))
        assert name in module.__all__
        assert name in preflash.__all__
