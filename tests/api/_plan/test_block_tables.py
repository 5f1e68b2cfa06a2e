"""A block table [batch_size, max_pages] may take the place of a page list."""

import dataclasses

import preflash
import pytest
import torch
from graph_stage import capture
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.case import Position

NO_PAGE = 2**31 - 1
CASE = Case("table", (30, 0, 9, 1), (100, 90, 7, 0), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
HALF = torch.float16
CASES = {
    "pages of 16": {},
    "pages of 1": {"page_size": 1},
    "pages of 128": {"page_size": 128},
    "one request": {"qo_lens": (30,), "kv_lens": (100,)},
    "split": {"fixed_split_size": 32},
    "custom mask": {"mask": MaskKind.CUSTOM},
    "rope": {"position": Position.ROPE, "dtype": HALF},
    "8-bit keys": {
        "dtype": HALF, "kv_dtype": torch.float8_e4m3fn, "qo_lens": (200,), "kv_lens": (300,)
    },
}  # fmt: skip


def table_of(inputs, device) -> torch.Tensor:
    """Returns the page table as rows, in which entries of no request are no pages."""
    indptr, indices = inputs.kv_indptr.cpu(), inputs.indices.cpu()
    width = int(indptr.diff().max()) + 3
    table = torch.full((inputs.case.batch_size, width), NO_PAGE, dtype=torch.int32)
    for i, row in enumerate(table):
        pages = indices[indptr[i] : indptr[i + 1]]
        row[: pages.numel()] = pages
    return table.to(device)


def with_table(inputs, table: torch.Tensor):
    return dataclasses.replace(inputs, indices=table)


def check(wrapper, inputs):
    result = runner.run(wrapper, inputs)
    runner.compare(inputs, *result).check()
    return result


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("spread", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_block_tables(target, changes, spread, where):
    inputs = build(dataclasses.replace(CASE, **changes), device=target.device)
    table = table_of(inputs, "cpu" if where == "host" else target.device)
    given = with_table(inputs, table)
    if spread:  # columns of a wider table, and a strided indptr that starts above zero
        spare, width = torch.full_like(table, NO_PAGE), table.shape[1]
        given.indices = torch.cat([spare, table, spare], 1)[:, width : 2 * width]
        given.kv_indptr = torch.stack([inputs.kv_indptr + 5] * 2, 1)[:, 0]
    got = check(runner.planned(given, backend=target.backend), inputs)
    exact = runner.planned(inputs, backend=target.backend)
    assert all(map(torch.equal, got, runner.run(exact, inputs)))


def test_a_run_reads_pages(target):
    """run() reads pages from the table itself, without a copy."""
    inputs = build(CASE, device=target.device)
    table = table_of(inputs, target.device)
    wrapper = runner.planned(with_table(inputs, table), backend=target.backend)
    page = int(table[0, 2])
    free = min(set(range(inputs.k.shape[0])) - set(inputs.indices.tolist()))
    for pool in (inputs.k, inputs.v):
        pool[free] = pool[page]
        pool[page] = float("nan")
    table[0, 2] = free
    out, lse = runner.run(wrapper, inputs)
    expected = build(CASE, device=target.device)
    runner.compare(expected, out, lse).check()


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
    check(wrapper, inputs)


def test_block_tables_twice(target, monkeypatch):
    """block_tables may repeat the table; another one is refused if it may be read."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    inputs = build(CASE, device=target.device)
    table = table_of(inputs, target.device)
    later = dataclasses.replace(inputs, kv_indptr=inputs.kv_indptr + 5, indices=table)
    wide = torch.cat([table, table], 1)
    for repeated in (table, table.clone(), wide[:, : table.shape[1]], wide):
        wrapper = runner.planned(later, backend=target.backend, block_tables=repeated)
        check(wrapper, inputs)
    other = table.clone()
    other[1, 0] += 1
    with pytest.raises(ValueError, match="block_tables differs from the block table"):
        runner.planned(later, backend=target.backend, block_tables=other)


@pytest.mark.parametrize(
    ("rows", "columns", "bounds"), [((), 0, 0), ((), 4, 0), ((3, 1), 0, 0), ((3, 1), 0, 1)]
)
def test_no_pages(target, rows, columns, bounds):
    case = dataclasses.replace(CASE, qo_lens=rows, kv_lens=(0,) * len(rows))
    inputs = build(case, device=target.device)
    ints = {"dtype": torch.int32, "device": target.device}
    options = {"seq_lens": torch.zeros(2, **ints)} if bounds else {}
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for _ in range(2):
        table = torch.empty(len(rows), columns, **ints)
        runner.plan(
            wrapper, with_table(inputs, table), lengths_are_upper_bounds=bool(bounds), **options
        )
        out, lse = runner.run(wrapper, inputs)
        assert torch.equal(out, torch.zeros_like(inputs.q))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def for_graphs(target, indices: torch.Tensor):
    ints = {"dtype": torch.int32, "device": target.device}
    return preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", True, torch.zeros(5, **ints),
        torch.zeros(5, **ints), indices, torch.zeros(4, **ints), backend=target.backend,
    )  # fmt: skip


def test_graphs(target, recorder):
    inputs = build(CASE, device=target.device)
    ints = {"dtype": torch.int32, "device": target.device}
    buffer = torch.zeros(4, 12, **ints)
    wrapper = for_graphs(target, buffer)
    out = torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], device=target.device)

    def run():
        wrapper.run(inputs.q, inputs.cache, out=out, lse=lse)

    graph = None
    host, there = (table_of(inputs, where) for where in ("cpu", target.device))
    buffer_itself = buffer[:, : there.shape[1]]
    for table in (there, host, buffer_itself, buffer):
        runner.plan(wrapper, with_table(inputs, table))
        if graph is None:
            run()
            graph = capture(recorder, target.device, run)
        assert torch.equal(buffer_itself, there)
        out.fill_(float("nan"))
        graph.replay()
        runner.compare(inputs, out, lse).check()
    flat = for_graphs(target, torch.zeros(99, **ints))
    for wrong, given, match in (
        (wrapper, inputs, "paged_kv_indices_buf is a block table"),
        (wrapper, with_table(inputs, torch.zeros(4, 13, **ints)), "needs a buffer of as many rows"),
        (flat, with_table(inputs, there), "needs a buffer of as many rows"),
    ):
        with pytest.raises(ValueError, match=match):
            runner.plan(wrong, given)


def with_entry(table, value: int):
    table = table.clone()
    table[2, 0] = value
    return table


REFUSED = [
    (lambda table: table[:3], ValueError, r"paged_kv_indices has shape \(3, 10\)"),
    (lambda table: table[:, :6], ValueError, r"paged_kv_indices has shape \(4, 6\)"),
    (lambda table: table.t().contiguous().t(), ValueError, "stride 4 in its last dimension; must"),
    (torch.Tensor.long, TypeError, "paged_kv_indices is torch.int64"),
    (lambda table: with_entry(table.cpu(), -1), ValueError, "paged_kv_indices holds -1"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSED)
def test_refusals(target, change, error, match):
    inputs = build(CASE, device=target.device)
    given = with_table(inputs, change(table_of(inputs, target.device)))
    with pytest.raises(error, match=match):
        runner.planned(given, backend=target.backend)


def test_wrong_pages(target, monkeypatch):
    """Pages on the host are compared with the pool; those on a GPU are checked on demand."""
    inputs = build(CASE, device=target.device)
    table = table_of(inputs, target.device)
    beyond = with_table(inputs, with_entry(table.cpu(), 10**6))
    wrapper = runner.planned(beyond, backend=target.backend)
    with pytest.raises(ValueError, match="paged_kv_indices holds 1000000"):
        runner.run(wrapper, inputs)
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    with pytest.raises(ValueError, match="paged_kv_indices holds -1"):
        runner.planned(with_table(inputs, with_entry(table, -1)), backend=target.backend)
