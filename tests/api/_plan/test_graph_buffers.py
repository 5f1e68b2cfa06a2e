"""Constructors with use_cuda_graph=True refuse wrong buffers by name."""

import preflash
import pytest
import torch
from planned_cases import mistakes, spoil
from preflash.testing import runner

INDPTR, PAGES, LAST = "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"


def paged_buffers(device) -> dict:
    sizes = {"qo_indptr_buf": 4, INDPTR: 4, PAGES: 9, LAST: 3}
    return {n: torch.zeros(k, dtype=torch.int32, device=device) for n, k in sizes.items()}


def with_buffers(target, **buffers):
    make = preflash.BatchPrefillWithPagedKVCacheWrapper
    return make(runner.workspace(target.device), use_cuda_graph=True, **buffers)


FOUR = torch.zeros(4, dtype=torch.int32)
REFUSED = [
    ("qo_indptr_buf", ValueError, [None, "qo_indptr_buf=None"],
     [lambda t: t[:0], "qo_indptr_buf is empty"], lambda t: t.to("meta")),
    ("qo_indptr_buf", TypeError, [torch.Tensor.float, "qo_indptr_buf is torch.float32"]),
    (INDPTR, ValueError, [lambda t: t[:3], f"{INDPTR} has 3 elements; must have 4"],
     [lambda t: t.view(2, 2), f"{INDPTR} has shape"]),
    (LAST, ValueError, [FOUR, f"{LAST} has 4 elements; must have 3"]),
    (PAGES, ValueError, [None, f"{PAGES}=None"],
     [lambda t: t[::2], f"{PAGES} has strides .* contiguous"]),
    ("custom_mask_buf", TypeError, [FOUR, "torch.int32; must be torch.uint8"]),
    ("qk_indptr_buf", ValueError, [FOUR[:2], "mask_indptr_buf has 2 elements"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "says"), mistakes(*REFUSED))
def test_bad_buffers(target, name, value, error, says):
    buffers = paged_buffers(target.device)
    spoil(buffers, name, value, target)
    with pytest.raises(error, match=says):
        with_buffers(target, **buffers)


def test_shared_buffers(target):
    buffers = paged_buffers(target.device)
    with pytest.raises(ValueError, match=f"{PAGES} shares memory with {LAST}"):
        with_buffers(target, **buffers | {LAST: buffers[PAGES][-3:]})
    with pytest.raises(ValueError, match=f"{PAGES} shares memory with custom_mask_buf"):
        with_buffers(target, **buffers, custom_mask_buf=buffers[PAGES].view(torch.uint8))
    indptr = target.to(FOUR)
    with_buffers(target, **buffers, qk_indptr_buf=indptr, mask_indptr_buf=indptr)
    with pytest.raises(TypeError, match="two spellings"):
        with_buffers(target, **buffers, qk_indptr_buf=indptr, mask_indptr_buf=indptr.clone())


def test_cascade_levels_have_buffers_of_their_own(target):
    make = preflash.MultiLevelCascadeAttentionWrapper
    work = runner.workspace(target.device)
    buffers = paged_buffers(target.device).items()
    lists = {f"{name}_arr": [buffer, buffer.clone()] for name, buffer in buffers}
    shared = {**lists, f"{PAGES}_arr": lists[f"{PAGES}_arr"][:1] * 2}
    with pytest.raises(ValueError, match=r"indices_buf_arr\[1\] shares memory with .*_arr\[0\]"):
        make(2, work, "NHD", True, **shared)
    assert make(2, work, "NHD", True, **lists).is_cuda_graph_enabled is True
