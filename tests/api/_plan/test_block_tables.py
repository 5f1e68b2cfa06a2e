"""A block table [batch_size, max_pages] may take the place of a page list, as in many problems of
the fuzzer."""

import dataclasses
import functools

import preflash
import pytest
import torch
from graph_stage import capture
from planned_cases import bounds_of
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused
from wrapper_options import block_table

NO_PAGE = 2**31 - 1
CASE = Case("table", (30, 0, 9, 1), (100, 90, 7, 0), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)


def with_table(inputs, table: torch.Tensor):
    return dataclasses.replace(inputs, indices=table)


def test_a_run_reads_pages(target):
    """run() reads pages from the table itself, without a copy."""
    inputs = build(CASE, device=target.device)
    table = block_table(inputs, unused=NO_PAGE).to(target.device)
    wrapper = runner.planned(with_table(inputs, table), backend=target.backend)
    page = int(table[0, 2])
    free = min(set(range(inputs.k.shape[0])) - set(inputs.indices.tolist()))
    for pool in (inputs.k, inputs.v):
        pool[free] = pool[page]
        pool[page] = float("nan")
    table[0, 2] = free
    result = runner.run(wrapper, inputs)
    runner.compare(build(CASE, device=target.device), *result).check()


@pytest.mark.parametrize(("rows", "columns"), [((), 0), ((), 4), ((3, 1), 0)])
def test_no_pages(target, rows, columns):
    case = dataclasses.replace(CASE, qo_lens=rows, kv_lens=(0,) * len(rows))
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    table = torch.empty(len(rows), columns, dtype=torch.int32, device=target.device)
    for options in ({}, {}, bounds_of(inputs)):
        runner.plan(wrapper, with_table(inputs, table), **options)
        out, lse = runner.run(wrapper, inputs)
        assert torch.equal(out, torch.zeros_like(inputs.q))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_graphs(target, recorder):
    inputs = build(CASE, device=target.device)
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=target.device)
    buffer = ints(4, 12)

    def for_graphs(indices):
        make, work = preflash.BatchPrefillWithPagedKVCacheWrapper, runner.workspace(target.device)
        return make(work, "NHD", True, ints(5), ints(5), indices, ints(4), backend=target.backend)

    wrapper, flat = for_graphs(buffer), for_graphs(ints(99))
    out = torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], device=target.device)

    def run():
        wrapper.run(inputs.q, inputs.cache, out=out, lse=lse)

    graph, there = None, block_table(inputs, unused=NO_PAGE).to(target.device)
    buffer_itself = buffer[:, : there.shape[1]]
    for table in (there, there.cpu(), buffer_itself, buffer):
        runner.plan(wrapper, with_table(inputs, table))
        if graph is None:
            run()
            graph = capture(recorder, target.device, run)
        assert torch.equal(buffer_itself, there)
        out.fill_(float("nan"))
        graph.replay()
        runner.compare(inputs, out, lse).check()
    rows = "needs a buffer of as many rows"
    refused("paged_kv_indices_buf is a block table", runner.plan, wrapper, inputs)
    refused(rows, runner.plan, wrapper, with_table(inputs, ints(4, 13)))
    refused(rows, runner.plan, flat, with_table(inputs, there))


def test_pages_beyond_the_pool(target):
    """Pages on the host are compared with the pool, by the first run of each plan."""
    inputs = build(CASE, device=target.device)
    table = block_table(inputs, unused=NO_PAGE)
    far = table.clone()
    far[2, 0] = 10**6
    wrapper = runner.make_wrapper(CASE, backend=target.backend, device=target.device)
    for one in (far, table, far):
        runner.plan(wrapper, with_table(inputs, one))
        if one is far:
            refused("paged_kv_indices holds 1000000", runner.run, wrapper, inputs)
