"""plan() refuses bounds, block tables and items that are wrong, constructors buffers of graphs."""

import dataclasses

import preflash
import pytest
import torch
from changed_tensors import meta, strided
from planned_cases import mistakes, plan_arguments, spoil, unplanned
from preflash.testing import Case, MaskKind, runner
from refusals import refused
from wrapper_options import block_table

PAGED = Case("paged", (37, 11), (54, 29), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, page_size=0)
LENS = torch.tensor(PAGED.kv_lens, dtype=torch.int32)
BOUNDS = {"seq_lens": LENS, "lengths_are_upper_bounds": True}
ITEMS = {
    "prefix_len_ptr": torch.tensor([17, 12]).to(torch.uint32),
    "token_pos_in_items_ptr": torch.zeros(80).to(torch.uint16),
    "token_pos_in_items_len": 40,
    "max_item_len_ptr": torch.tensor([18, 8]).to(torch.uint16),
}
# A case, and options of plan() beside those of the case.
BATCHES = {
    "bounds": (PAGED, BOUNDS),
    "bounds_window": (PAGED, {**BOUNDS, "window_left": 9}),
    "table": (PAGED, {}),
    "items": (PAGED, ITEMS),
    "ragged_items": (RAGGED, ITEMS),
}
MASK = torch.ones(37 * 54 + 11 * 29).bool()


def with_page(page: int, *, on_host: bool = False):
    """Returns a change of a table's first page of the last request."""

    def change(table):
        table = table.cpu().clone() if on_host else table.clone()
        table[1, 0] = page
        return table

    return change


TABLE = "paged_kv_indices"
BOUNDS_REFUSED = [
    ("seq_lens", ValueError, [None, "lengths_are_upper_bounds=True and seq_lens=None"],
     [lambda t: t[:1], r"seq_lens has shape \(1,\)"],
     [strided, "seq_lens .*contiguous"],
     # Lengths on the GPU are only read under PREFLASH_DEBUG.
     [lambda t: t + 1, r"seq_lens\[0\] = 55: must be in \[0, 54\]"]),
    ("seq_lens", TypeError, [torch.Tensor.long, r"seq_lens is torch.int64.*\.int\(\)"]),
    ("lengths_are_upper_bounds", TypeError, "yes"),
    ("custom_mask", NotImplementedError, [MASK, "with a custom mask"]),
]  # fmt: skip
TABLE_REFUSED = [
    (TABLE, ValueError, [lambda t: t[:1], rf"{TABLE} has shape \(1, 5\)"],
     [lambda t: t[:, :3], rf"{TABLE} has shape \(2, 3\)"],
     [lambda t: t.t().contiguous().t(), "stride 2 in its last dimension; must"],
     [with_page(-1, on_host=True), f"{TABLE} holds -1"],
     [with_page(-1), f"{TABLE} holds -1"]),
    (TABLE, TypeError, [torch.Tensor.long, f"{TABLE} is torch.int64"]),
    ("block_tables", ValueError,
     [torch.zeros(2, 5, dtype=torch.int32), "block_tables differs from the block table"]),
]  # fmt: skip
ITEMS_REFUSED = [
    ("prefix_len_ptr", ValueError, None, [torch.ones(1).int(), "prefix_len_ptr has shape"]),
    ("prefix_len_ptr", TypeError, [torch.ones(2), "prefix_len_ptr is"]),
    ("token_pos_in_items_ptr", ValueError, [None, "token_pos_in_items_ptr=None"]),
    ("token_pos_in_items_ptr", TypeError, [torch.ones(80), "token_pos_in_items_ptr is"]),
    ("token_pos_in_items_len", TypeError, [1.5, "token_pos_in_items_len must"]),
    ("max_item_len_ptr", ValueError, torch.ones(1).int()),
    ("custom_mask", ValueError, MASK),
]
REFUSED = {
    "bounds": BOUNDS_REFUSED,
    "bounds_window": [("fixed_split_size", ValueError, [64, "not split at fixed keys"])],
    "table": TABLE_REFUSED,
    "items": ITEMS_REFUSED,
    "ragged_items": ITEMS_REFUSED,
}
ROWS = [
    pytest.param(batch, *row.values, id=f"{batch}-{row.id}")
    for batch, rows in REFUSED.items()
    for row in mistakes(*rows)
]


@pytest.mark.parametrize(("batch", "argument", "value", "error", "says"), ROWS)
def test_refusals(target, monkeypatch, batch, argument, value, error, says):
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    case, options = BATCHES[batch]
    inputs, wrapper = unplanned(case, target)
    moved = {k: target.to(x) if hasattr(x, "device") else x for k, x in options.items()}
    arguments = plan_arguments(inputs) | moved
    if batch == "table":
        arguments[TABLE] = block_table(inputs).to(target.device)
    wrapper.plan(**arguments)
    expected = runner.run(wrapper, inputs)
    spoil(arguments, argument, value, target)
    refused(says, wrapper.plan, error=error, **arguments)
    assert all(map(torch.equal, runner.run(wrapper, inputs), expected))


INDPTR, PAGES, LAST = "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"
SIZES = {"qo_indptr_buf": 4, INDPTR: 4, PAGES: 9, LAST: 3}
FOUR = torch.zeros(4, dtype=torch.int32)
BUFFERS_REFUSED = [
    ("qo_indptr_buf", ValueError, [None, "qo_indptr_buf=None"],
     [lambda t: t[:0], "qo_indptr_buf is empty"], meta),
    ("qo_indptr_buf", TypeError, [torch.Tensor.float, "qo_indptr_buf is torch.float32"]),
    (INDPTR, ValueError, [lambda t: t[:3], f"{INDPTR} has 3 elements; must have 4"],
     [lambda t: t.view(2, 2), f"{INDPTR} has shape"]),
    (LAST, ValueError, [FOUR, f"{LAST} has 4 elements; must have 3"]),
    (PAGES, ValueError, [None, f"{PAGES}=None"],
     [strided, f"{PAGES} has strides .* contiguous"]),
    ("custom_mask_buf", TypeError, [FOUR, "torch.int32; must be torch.uint8"]),
    ("qk_indptr_buf", ValueError, [FOUR[:2], "mask_indptr_buf has 2 elements"]),
]  # fmt: skip


def buffers_of(target) -> dict:
    return {name: target.to(torch.zeros(n, dtype=torch.int32)) for name, n in SIZES.items()}


def with_buffers(target, **buffers):
    make = preflash.BatchPrefillWithPagedKVCacheWrapper
    return make(runner.workspace(target.device), use_cuda_graph=True, **buffers)


@pytest.mark.parametrize(("name", "value", "error", "says"), mistakes(*BUFFERS_REFUSED))
def test_bad_buffers(target, name, value, error, says):
    buffers = buffers_of(target)
    spoil(buffers, name, value, target)
    refused(says, with_buffers, target, error=error, **buffers)


def test_shared_buffers(target):
    buffers, indptr = buffers_of(target), target.to(FOUR)
    pages = buffers[PAGES]
    with_buffers(target, **buffers, qk_indptr_buf=indptr, mask_indptr_buf=indptr)
    for says, error, more in (
        (f"{PAGES} shares memory with {LAST}", ValueError, {LAST: pages[-3:]}),
        (f"{PAGES} shares memory with custom_mask_buf", ValueError,
         {"custom_mask_buf": pages.view(torch.uint8)}),
        ("two spellings", TypeError, {"qk_indptr_buf": indptr, "mask_indptr_buf": indptr.clone()}),
    ):  # fmt: skip
        refused(says, with_buffers, target, error=error, **buffers | more)


def test_cascade_levels_have_buffers_of_their_own(target):
    make, work = preflash.MultiLevelCascadeAttentionWrapper, runner.workspace(target.device)
    buffers = buffers_of(target).items()
    lists = {f"{name}_arr": [buffer, buffer.clone()] for name, buffer in buffers}
    shared = {**lists, f"{PAGES}_arr": lists[f"{PAGES}_arr"][:1] * 2}
    says = r"indices_buf_arr\[1\] shares memory with .*_arr\[0\]"
    refused(says, make, 2, work, "NHD", True, **shared)
    assert make(2, work, "NHD", True, **lists).is_cuda_graph_enabled is True
