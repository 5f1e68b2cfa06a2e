"""Public names have FlashInfer's homes, and calls of one family take the same options.

The order and the defaults of parameters are in the stubs: tests/codegen/test_stubs.py compares
them, test_newer_calls.py and test_direct_calls.py call by position.
"""

import inspect

import preflash
import pytest

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


@pytest.mark.parametrize(("home", "names"), HOMES.items(), ids=HOMES)
def test_names_are_in_their_module_and_on_top(home, names):
    module = getattr(preflash, home)
    for name in names.split():
        assert getattr(module, name) is getattr(preflash, name)
        assert inspect.getdoc(getattr(module, name))
        assert name in module.__all__
        assert name in preflash.__all__


@pytest.mark.parametrize("name", ["Paged", "Ragged"])
def test_methods_of_a_wrapper(name):
    wrapper = getattr(preflash, f"BatchPrefillWith{name}KVCacheWrapper")
    plan, begin, size = (
        inspect.signature(getattr(wrapper, method)).parameters
        for method in ("plan", "begin_forward", "workspace_size")
    )
    assert list(plan.values()) == list(begin.values())
    assert set(plan) - {"non_blocking"} == set(size) - {"non_blocking"}
    for method in ("run_return_lse", "forward", "forward_return_lse", "end_forward"):
        assert callable(getattr(wrapper, method)), method
