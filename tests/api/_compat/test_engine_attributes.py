"""Attributes with an underscore show what is planned, as serving engines read them; those that
kernels would not see cannot be written."""

import dataclasses
import functools

import preflash
import pytest
import torch
from planned_cases import check_run, planned, unplanned
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused

RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
DECODE = dataclasses.replace(PAGED, name="decode", qo_lens=(1, 1))
WRAPPERS = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
ARRAYS = {
    RAGGED: {"_qo_indptr_buf": "qo_indptr", "_kv_indptr_buf": "kv_indptr"},
    PAGED: {
        "_qo_indptr_buf": "qo_indptr",
        "_paged_kv_indptr_buf": "kv_indptr",
        "_paged_kv_indices_buf": "indices",
        "_paged_kv_last_page_len_buf": "last_page_len",
    },
}
POSITION = ["_pos_encoding_mode", "_rope_scale", "_rope_theta"]
OF_A_PLAN = [
    *POSITION, "_custom_mask_buf", "_mask_indptr_buf", "_plan_info", "_num_qo_heads",
    "_batch_size", "_int_workspace_buffer",
]  # fmt: skip
READ_ONLY = [
    *OF_A_PLAN, "_backend", "_cached_kv_data_type", "_cached_module", "_cached_o_data_type",
    "_cached_q_data_type", "_causal", "_fixed_batch_size", "_float_workspace_buffer",
    "_logits_soft_cap", "_max_total_num_rows", "_num_kv_heads", "_pin_memory_int_workspace_buffer",
    "_qo_indptr_last", "_sm_scale", "_window_left",
]  # fmt: skip


def values_of(wrapper, *names) -> list:
    return [getattr(wrapper, name) for name in names]


def table_of(inputs) -> tuple:
    return inputs.kv_indptr, inputs.indices, inputs.last_page_len


def assert_refused(wrapper, *names, value=None, error=AttributeError, says="{} is read-only"):
    for name in names:
        refused(says.format(name), setattr, wrapper, name, value, error=error)


@WRAPPERS
def test_before_and_after_plan(target, case):
    inputs, wrapper = unplanned(dataclasses.replace(case, mask=MaskKind.CUSTOM), target)
    for name in (*ARRAYS[case], *OF_A_PLAN):
        assert getattr(wrapper, name) is None, name
    assert_refused(wrapper, *ARRAYS[case], *READ_ONLY, *["_kv_lens_buffer"] * case.paged)
    runner.plan(wrapper, inputs, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=5e4)
    assert values_of(wrapper, *POSITION) == ["ROPE_LLAMA", 2.0, 5e4]
    runner.plan(wrapper, inputs)
    assert values_of(wrapper, *POSITION) == ["NONE", 1.0, 1e4]
    for name, source in ARRAYS[case].items():
        shown, planned_from = getattr(wrapper, name), getattr(inputs, source)
        assert str(shown.device).startswith(target.device)
        assert torch.equal(shown.cpu(), planned_from.cpu()[: shown.numel()]), name
        assert shown.dtype == torch.int32
    packed, indptr = preflash.segment_packbits(
        inputs.custom_mask, torch.tensor([0, 270, 285]).to(target.device), bitorder="little"
    )
    assert torch.equal(wrapper._custom_mask_buf, packed)
    assert torch.equal(wrapper._mask_indptr_buf.cpu(), indptr.cpu())
    assert values_of(wrapper, "_num_qo_heads", "_num_kv_heads", "_batch_size") == [4, 2, 2]
    graphs = ("_use_cuda_graph", "_fixed_batch_size", "_qo_indptr_last", "_max_total_num_rows")
    assert values_of(wrapper, *graphs) == [False, 0, 12, None]
    assert values_of(wrapper, "_pin_memory_int_workspace_buffer", "_jit_module") == [None] * 2
    assert wrapper._plan_info.id == wrapper.variant
    assert wrapper._int_workspace_buffer.numel() >= wrapper._plan_info.int_bytes
    assert wrapper._float_workspace_buffer.device.type == target.device
    if case.paged:
        assert wrapper._kv_lens_buffer.tolist() == list(case.kv_lens)
    with pytest.raises(NotImplementedError, match=r"plan\(\)"):
        wrapper._cached_module.plan(wrapper._float_workspace_buffer)
    assert_refused(wrapper, "_jit_module", value=object(), error=NotImplementedError, says="{}")


WRITES = [
    lambda shown: shown.copy_(torch.zeros_like(shown)),
    lambda shown: shown[:1].copy_(shown[1:2]),
    lambda shown: shown.__setitem__(0, 3),
    lambda shown: shown.__iadd__(1),
    lambda shown: torch.add(torch.ones_like(shown), 1, out=shown),
    lambda shown: shown.view(-1).zero_(),
]


@pytest.mark.parametrize("name", ["_paged_kv_last_page_len_buf", "_custom_mask_buf"])
def test_arrays_of_a_plan_cannot_be_written(target, name):
    """Kernels would not see a written length; the full and empty tiles of a written mask would
    be those of the plan. plan() itself takes them."""
    inputs, wrapper = planned(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target)
    for write in WRITES:
        refused(r"plan\(\)", write, getattr(wrapper, name), error=NotImplementedError)
    getattr(wrapper, name).view(-1).clone().fill_(0)
    check_run(inputs, wrapper)
    wrapper.plan(
        *values_of(wrapper, *ARRAYS[PAGED]), 4, 2, 64, 16, q_data_type=PAGED.dtype,
        packed_custom_mask=wrapper._custom_mask_buf,
    )  # fmt: skip
    check_run(inputs, wrapper)


@pytest.mark.parametrize("case", [PAGED, DECODE], ids=lambda case: case.name)
def test_graph_buffers_that_are_set_afterwards(target, case):
    """RTP-LLM sets graph buffers before its first plan()."""
    inputs, decodes = build(case, device=target.device), case is DECODE
    kind = f"Batch{'Decode' if decodes else 'Prefill'}WithPagedKVCacheWrapper"
    wrapper = getattr(preflash, kind)(runner.workspace(target.device), backend=target.backend)
    assert values_of(wrapper, "_qo_indptr_buf", "_fixed_batch_size") == [None, 0]
    assert_refused(wrapper, "_paged_kv_indices_buf")
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=target.device)
    wrapper._use_cuda_graph = True
    assert wrapper.is_cuda_graph_enabled
    if not decodes:
        wrapper._qo_indptr_buf = ints(3)
    wrapper._paged_kv_indptr_buf = indptr = ints(3)
    wrapper._paged_kv_last_page_len_buf = ints(2)
    wrapper._paged_kv_indices_buf = ints(64)
    wrapper._fixed_batch_size = 2
    assert wrapper._paged_kv_indptr_buf is indptr
    assert wrapper._fixed_batch_size == 2
    for _ in range(2):
        if decodes:
            wrapper.plan(*table_of(inputs), 4, 2, 64, 16, q_data_type=case.dtype)
        else:
            runner.plan(wrapper, inputs)
        check_run(inputs, wrapper)
    assert torch.equal(indptr, inputs.kv_indptr.to(indptr.device))
    wrapper._use_cuda_graph = True  # no change
    assert_refused(wrapper, "_use_cuda_graph", value=False, says=r"after plan\(\)")
    assert_refused(wrapper, "_paged_kv_indptr_buf")


def test_graph_buffers_that_are_missing(target):
    inputs, wrapper = unplanned(PAGED, target)
    wrapper._use_cuda_graph = True
    refused("qo_indptr_buf=None", runner.plan, wrapper, inputs)
    wrapper._use_cuda_graph = False
    runner.plan(wrapper, inputs)
    check_run(inputs, wrapper)
    assert_refused(wrapper, "_use_cuda_graph", value=True, says=r"after plan\(\)")


def test_wrappers_of_several_batches(target):
    """POD shows its decode batch, batches of POD both, and a cascade its wrappers."""
    prefill, inputs = (build(case, device=target.device) for case in (PAGED, DECODE))
    sizes, work = (4, 2, 64, 16), runner.workspace(target.device)
    wrapper = preflash.PODWithPagedKVCacheWrapper(work, backend=target.backend)
    assert wrapper._paged_kv_indptr_buf is None
    wrapper.plan(*table_of(inputs), *sizes, q_data_type=PAGED.dtype, sm_scale=0.25)
    options = ("_sm_scale", "_window_left", "_use_cuda_graph", "_cached_q_data_type")
    assert values_of(wrapper, *options) == [0.25, -1, False, PAGED.dtype]
    assert values_of(wrapper, *POSITION) == ["NONE", 1.0, 1e4]
    assert torch.equal(wrapper._paged_kv_indptr_buf.cpu(), inputs.kv_indptr.cpu())
    assert torch.equal(wrapper._paged_kv_last_page_len_buf.cpu(), inputs.last_page_len.cpu())
    assert wrapper._float_workspace_buffer.numel() == runner.WORKSPACE_BYTES
    assert_refused(wrapper, "_sm_scale")

    wrapper = preflash.BatchPODWithPagedKVCacheWrapper(work, backend=target.backend)
    assert wrapper._kv_indptr_buf_p is None
    arrays = [array for i in (prefill, inputs) for array in (i.qo_indptr, *table_of(i))]
    wrapper.plan(*arrays, *sizes, q_data_type=PAGED.dtype)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    shown = values_of(wrapper, *(f"_{name}_buf_{side}" for side in "pd" for name in names))
    for values, given in zip(shown, arrays, strict=True):
        assert torch.equal(values.cpu(), given.cpu()[: values.numel()])
    assert_refused(wrapper, "_kv_indptr_buf_p")
    no_graphs = {"error": NotImplementedError, "says": "CUDA graphs"}
    assert_refused(wrapper, "_use_cuda_graph", value=True, **no_graphs)

    cascade = preflash.MultiLevelCascadeAttentionWrapper(2, work)
    kinds = [type(level) for level in cascade._batch_prefill_wrappers]
    assert kinds == [preflash.BatchPrefillWithPagedKVCacheWrapper] * cascade._num_levels
    assert cascade._num_levels == 2
