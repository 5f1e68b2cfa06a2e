"""Constructors with use_cuda_graph=True refuse wrong buffers by name."""

import preflash
import pytest
import torch
from preflash.testing import runner

INDPTR, PAGES, LAST = "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"


def paged_buffers(device) -> dict:
    sizes = {"qo_indptr_buf": 4, INDPTR: 4, PAGES: 9, LAST: 3}
    return {n: torch.zeros(k, dtype=torch.int32, device=device) for n, k in sizes.items()}


# The buffer that is changed, its value made of all buffers, and a piece of the message.
BAD_BUFFERS = [
    ("qo_indptr_buf", lambda b: None, "qo_indptr_buf=None"),
    (PAGES, lambda b: None, "paged_kv_indices_buf=None"),
    ("qo_indptr_buf", lambda b: b["qo_indptr_buf"].float(), "qo_indptr_buf is torch.float32"),
    ("qo_indptr_buf", lambda b: b["qo_indptr_buf"][:0], "qo_indptr_buf is empty"),
    ("qo_indptr_buf", lambda b: b["qo_indptr_buf"].to("meta"), "qo_indptr_buf"),
    (INDPTR, lambda b: b[INDPTR][:3], "paged_kv_indptr_buf has 3 elements; must have 4"),
    (INDPTR, lambda b: b[INDPTR].view(2, 2), "paged_kv_indptr_buf has shape"),
    (LAST, lambda b: b[INDPTR], "paged_kv_last_page_len_buf has 4 elements; must have 3"),
    (PAGES, lambda b: b[PAGES][::2], "paged_kv_indices_buf has strides .* contiguous"),
    ("custom_mask_buf", lambda b: b[INDPTR], "custom_mask_buf is torch.int32; must be torch.uint8"),
    ("qk_indptr_buf", lambda b: b[INDPTR][:2], "mask_indptr_buf has 2 elements"),
    (LAST, lambda b: b[PAGES][-3:], f"{PAGES} shares memory with {LAST}"),
    (
        "custom_mask_buf",
        lambda b: b[PAGES].view(torch.uint8),
        "paged_kv_indices_buf shares memory with custom_mask_buf",
    ),
]


@pytest.mark.parametrize(("name", "spoil", "match"), BAD_BUFFERS)
def test_bad_buffers(target, name, spoil, match):
    buffers = paged_buffers(target.device)
    buffers[name] = spoil(buffers)
    with pytest.raises((TypeError, ValueError), match=match):
        preflash.BatchPrefillWithPagedKVCacheWrapper(
            runner.workspace(target.device), use_cuda_graph=True, **buffers
        )


def test_two_names_of_one_buffer(target):
    buffers = paged_buffers(target.device)
    indptr = torch.zeros(4, dtype=torch.int32, device=target.device)
    make = preflash.BatchPrefillWithPagedKVCacheWrapper
    options = {"use_cuda_graph": True, "qk_indptr_buf": indptr, **buffers}
    make(runner.workspace(target.device), mask_indptr_buf=indptr, **options)
    with pytest.raises(TypeError, match="two spellings"):
        make(runner.workspace(target.device), mask_indptr_buf=indptr.clone(), **options)


def test_cascade_levels_have_buffers_of_their_own(target):
    make = preflash.MultiLevelCascadeAttentionWrapper
    work = runner.workspace(target.device)
    with pytest.raises(ValueError, match="qo_indptr_buf=None"):
        make(2, work, "NHD", True)
    buffers = paged_buffers(target.device).items()
    lists = {f"{name}_arr": [buffer, buffer.clone()] for name, buffer in buffers}
    shared = {**lists, f"{PAGES}_arr": lists[f"{PAGES}_arr"][:1] * 2}
    with pytest.raises(ValueError, match=r"indices_buf_arr\[1\] shares memory with .*_arr\[0\]"):
        make(2, work, "NHD", True, **shared)
    assert make(2, work, "NHD", True, **lists).is_cuda_graph_enabled is True
