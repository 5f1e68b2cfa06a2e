"""A block table [batch_size, max_pages] in the place of a page list."""

from __future__ import annotations

import dataclasses

import preflash
import pytest
import torch
from graph_stage import capture, recorder  # noqa: F401
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.case import Position

NO_PAGE = 2**31 - 1
CASE = Case("table", (30, 0, 9, 1), (100, 90, 7, 0), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
CASES = {
    "pages of 16": CASE,
    "pages of 1": dataclasses.replace(CASE, page_size=1),
    "pages of 128": dataclasses.replace(CASE, page_size=128),
    "one request": dataclasses.replace(CASE, qo_lens=(30,), kv_lens=(100,)),
    "split": dataclasses.replace(CASE, fixed_split_size=32),
    "custom mask": dataclasses.replace(CASE, mask=MaskKind.CUSTOM),
    "rope": dataclasses.replace(CASE, position=Position.ROPE, dtype=torch.float16),
    "8-bit keys": dataclasses.replace(
        CASE, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, qo_lens=(200,), kv_lens=(300,)
    ),
}


def table_of(inputs, device, *, spare: int = 3) -> torch.Tensor:
    """The page table as rows; what belongs to no request is no page."""
    indptr, indices = inputs.kv_indptr.cpu(), inputs.indices.cpu()
    width = int(indptr.diff().max()) + spare
    table = torch.full((inputs.case.batch_size, width), NO_PAGE, dtype=torch.int32)
    for i, row in enumerate(table):
        pages = indices[indptr[i] : indptr[i + 1]]
        row[: pages.numel()] = pages
    return table.to(device)


def with_table(inputs, table: torch.Tensor):
    return dataclasses.replace(inputs, indices=table)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("spread", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_block_tables(target, case, spread, where):
    inputs = build(case, device=target.device)
    table = table_of(inputs, "cpu" if where == "host" else target.device)
    if spread:  # columns of a wider table
        shape = (table.shape[0], table.shape[1] + 20)
        wide = torch.full(shape, NO_PAGE, dtype=torch.int32, device=table.device)
        wide[:, 7 : 7 + table.shape[1]] = table
        table = wide[:, 7 : 7 + table.shape[1]]
    wrapper = runner.planned(with_table(inputs, table), backend=target.backend)
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse).check()
    exact = runner.planned(inputs, backend=target.backend)
    for got, wanted in zip((out, lse), runner.run(exact, inputs), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("spread", [False, True], ids=["contiguous", "strided"])
def test_arrays_that_start_above_zero(target, spread):
    inputs = build(CASE, device=target.device)
    indptr = inputs.kv_indptr + 5
    if spread:
        indptr = torch.stack([indptr, indptr], 1)[:, 0]
    later = dataclasses.replace(inputs, kv_indptr=indptr)
    for where in ("cpu", target.device):
        table = table_of(inputs, where)
        wrapper = runner.planned(with_table(later, table), backend=target.backend)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_pages_are_read_when_a_run_is(target):
    """run() reads pages from the table itself, without a copy."""
    inputs = build(CASE, device=target.device)
    table = table_of(inputs, target.device)
    wrapper = runner.planned(with_table(inputs, table), backend=target.backend)
    page = int(table[0, 2])
    free = min(set(range(inputs.k.shape[0])) - set(inputs.indices.tolist()))
    for pool in (inputs.k, inputs.v):
        pool[free] = pool[page]
    table[0, 2] = free
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse).check()


def test_decode_and_upper_bounds(target):
    """Plans a decode step as an engine does that runs ahead of its lengths."""
    case = dataclasses.replace(CASE, qo_lens=(1, 1, 1, 1))
    inputs = build(case, device=target.device)
    longer = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)  # 8 pages, 128 keys each
    last = torch.full((4,), 16, dtype=torch.int32)
    lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=target.device)
    table = table_of(inputs, target.device)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    wrapper.plan(
        longer, table, last, 4, 2, 64, 16, q_data_type=case.dtype, block_tables=table,
        seq_lens=lens, lengths_are_upper_bounds=True,
    )  # fmt: skip
    result = wrapper.run(inputs.q, inputs.cache, return_lse=True)
    runner.compare(inputs, *result).check()


def test_block_tables_twice(target, monkeypatch):
    """block_tables may repeat the table; another one is refused where it may be read."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    later = build(CASE, device=target.device)
    later.kv_indptr = later.kv_indptr + 5
    table = table_of(build(CASE, device=target.device), target.device)
    wide = torch.cat([table, table], 1)
    for repeated in (table, table.clone(), wide[:, : table.shape[1]], wide):
        wrapper = runner.planned(
            with_table(later, table), backend=target.backend, block_tables=repeated
        )
        runner.compare(later, *runner.run(wrapper, later)).check()
    other = table.clone()
    other[1, 0] += 1
    with pytest.raises(ValueError, match="block_tables differs from the block table"):
        runner.planned(with_table(later, table), backend=target.backend, block_tables=other)


@pytest.mark.parametrize("columns", [0, 4])
def test_no_requests(target, columns):
    inputs = build(dataclasses.replace(CASE, qo_lens=(), kv_lens=()), device=target.device)
    table = torch.empty(0, columns, dtype=torch.int32, device=target.device)
    wrapper = runner.planned(with_table(inputs, table), backend=target.backend)
    assert wrapper.run(inputs.q, inputs.cache).shape == inputs.q.shape


def test_graphs(target, recorder):  # noqa: F811
    inputs = build(CASE, device=target.device)
    device, ints = target.device, {"dtype": torch.int32, "device": target.device}
    buffer = torch.zeros(4, 12, **ints)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(device), "NHD", True, torch.zeros(5, **ints), torch.zeros(5, **ints),
        buffer, torch.zeros(4, **ints), backend=target.backend,
    )  # fmt: skip
    out = torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], device=device)

    def run():
        wrapper.run(inputs.q, inputs.cache, out=out, lse=lse)

    graph = None
    host, there = (table_of(inputs, where) for where in ("cpu", device))
    buffer_itself = buffer[:, : there.shape[1]]
    for table in (there, host, buffer_itself, buffer):
        runner.plan(wrapper, with_table(inputs, table))
        if graph is None:
            run()
            graph = capture(recorder, device, run)
        assert torch.equal(buffer[:, : there.shape[1]], there)
        out.fill_(float("nan"))
        graph.replay()
        runner.compare(inputs, out, lse).check()
    with pytest.raises(ValueError, match="paged_kv_indices_buf is a block table"):
        runner.plan(wrapper, inputs)
    with pytest.raises(ValueError, match="needs a buffer of as many rows"):
        runner.plan(wrapper, with_table(inputs, torch.zeros(4, 13, **ints)))
    flat = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(device), "NHD", True, torch.zeros(5, **ints), torch.zeros(5, **ints),
        torch.zeros(99, **ints), torch.zeros(4, **ints), backend=target.backend,
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs a buffer of as many rows"):
        runner.plan(flat, with_table(inputs, there))


def test_refusals(target, monkeypatch):
    inputs = build(CASE, device=target.device)
    table = table_of(inputs, target.device)

    def refuse(error, match, other):
        with pytest.raises(error, match=match):
            runner.planned(with_table(inputs, other), backend=target.backend)

    refuse(ValueError, r"paged_kv_indices has shape \(3, 10\)", table[:3])
    refuse(ValueError, r"paged_kv_indices has shape \(4, 6\)", table[:, :6])
    refuse(
        ValueError,
        "stride 4 in its last dimension; must be contiguous",
        table.t().contiguous().t(),
    )
    refuse(TypeError, "paged_kv_indices is torch.int64", table.long())
    table[2, 0] = -1
    refuse(ValueError, "paged_kv_indices holds -1", table.cpu())
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    refuse(ValueError, "paged_kv_indices holds -1", table)
    table[2, 0] = 10**6
    wrapper = runner.planned(with_table(inputs, table.cpu()), backend=target.backend)
    with pytest.raises(ValueError, match="paged_kv_indices holds 1000000"):
        runner.run(wrapper, inputs)


@pytest.mark.parametrize("bounds", [False, True])
def test_requests_without_keys_and_a_table_without_columns(target, bounds):
    case = dataclasses.replace(CASE, qo_lens=(3, 1), kv_lens=(0, 0))
    inputs = build(case, device=target.device)
    options = {}
    if bounds:
        lens = torch.zeros(2, dtype=torch.int32, device=target.device)
        options = {"seq_lens": lens, "lengths_are_upper_bounds": True}
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    empty = torch.empty(2, 0, dtype=torch.int32, device=target.device)
    for _ in range(2):
        runner.plan(wrapper, with_table(inputs, empty), **options)
        out, lse = runner.run(wrapper, inputs)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
