"""Refused buffers of use_cuda_graph=True: missing ones, other shapes or dtypes, shared memory."""

import contextlib

import preflash
import pytest
import torch
from preflash.testing import runner


def paged_buffers(device) -> dict:
    return {
        "qo_indptr_buf": torch.zeros(4, dtype=torch.int32, device=device),
        "paged_kv_indptr_buf": torch.zeros(4, dtype=torch.int32, device=device),
        "paged_kv_indices_buf": torch.zeros(9, dtype=torch.int32, device=device),
        "paged_kv_last_page_len_buf": torch.zeros(3, dtype=torch.int32, device=device),
    }


BAD_BUFFERS = {
    "missing": (lambda b: b.pop("qo_indptr_buf"), "qo_indptr_buf=None"),
    "missing indices": (lambda b: b.pop("paged_kv_indices_buf"), "paged_kv_indices_buf=None"),
    "int64": (lambda b: b.update(qo_indptr_buf=torch.zeros(4)), "qo_indptr_buf is torch.float32"),
    "empty": (
        lambda b: b.update(qo_indptr_buf=b["qo_indptr_buf"][:0]),
        "qo_indptr_buf is empty",
    ),
    "shorter": (
        lambda b: b.update(paged_kv_indptr_buf=b["paged_kv_indptr_buf"][:3]),
        "paged_kv_indptr_buf has 3 elements; must have 4",
    ),
    "longer": (
        lambda b: b.update(paged_kv_last_page_len_buf=b["paged_kv_indptr_buf"]),
        "paged_kv_last_page_len_buf has 4 elements; must have 3",
    ),
    "two-dimensional": (
        lambda b: b.update(paged_kv_indptr_buf=b["paged_kv_indptr_buf"].view(2, 2)),
        "paged_kv_indptr_buf has shape",
    ),
    "strided": (
        lambda b: b.update(paged_kv_indices_buf=b["paged_kv_indices_buf"][::2]),
        "paged_kv_indices_buf has strides .* contiguous",
    ),
    "elsewhere": (
        lambda b: b.update(qo_indptr_buf=b["qo_indptr_buf"].to("meta")),
        "qo_indptr_buf",
    ),
    "mask": (
        lambda b: b.update(custom_mask_buf=b["qo_indptr_buf"]),
        "custom_mask_buf is torch.int32; must be torch.uint8",
    ),
    "mask indptr": (
        lambda b: b.update(qk_indptr_buf=b["qo_indptr_buf"][:2]),
        "mask_indptr_buf has 2 elements",
    ),
    "indices and last pages": (
        lambda b: b.update(paged_kv_last_page_len_buf=b["paged_kv_indices_buf"][-3:]),
        "paged_kv_indices_buf shares memory with paged_kv_last_page_len_buf",
    ),
    "mask and indices": (
        lambda b: b.update(custom_mask_buf=b["paged_kv_indices_buf"].view(torch.uint8)),
        "paged_kv_indices_buf shares memory with custom_mask_buf",
    ),
}


@pytest.mark.parametrize(("spoil", "match"), BAD_BUFFERS.values(), ids=BAD_BUFFERS)
def test_bad_buffers(target, spoil, match):
    buffers = paged_buffers(target.device)
    spoil(buffers)
    if "torch.float32" in match:
        buffers["qo_indptr_buf"] = buffers["qo_indptr_buf"].to(target.device)
    with pytest.raises((TypeError, ValueError), match=match):
        preflash.BatchPrefillWithPagedKVCacheWrapper(
            runner.workspace(target.device), use_cuda_graph=True, **buffers
        )


def test_two_names_of_one_buffer(target):
    buffers = paged_buffers(target.device)
    indptr = torch.zeros(4, dtype=torch.int32, device=target.device)
    make = preflash.BatchPrefillWithPagedKVCacheWrapper
    work = runner.workspace(target.device)
    make(work, use_cuda_graph=True, qk_indptr_buf=indptr, mask_indptr_buf=indptr, **buffers)
    with pytest.raises(TypeError, match="two spellings"):
        make(
            work,
            use_cuda_graph=True,
            qk_indptr_buf=indptr,
            mask_indptr_buf=indptr.clone(),
            **buffers,
        )


def test_cascade_levels_have_buffers_of_their_own(target):
    make = preflash.MultiLevelCascadeAttentionWrapper
    work = runner.workspace(target.device)
    with pytest.raises(ValueError, match="qo_indptr_buf=None"):
        make(2, work, "NHD", True)
    lists = {}
    for name, buffer in paged_buffers(target.device).items():
        lists[f"{name}_arr"] = [buffer, buffer.clone()]
    shared = {**lists, "paged_kv_indices_buf_arr": lists["paged_kv_indices_buf_arr"][:1] * 2}
    with pytest.raises(ValueError, match=r"indices_buf_arr\[1\] shares memory with .*_arr\[0\]"):
        make(2, work, "NHD", True, **shared)
    wrapper = make(2, work, "NHD", True, **lists)
    assert wrapper.is_cuda_graph_enabled is True
    with contextlib.suppress(NotImplementedError):
        assert wrapper._levels[1]._qo_indptr_buf is lists["qo_indptr_buf_arr"][1]
