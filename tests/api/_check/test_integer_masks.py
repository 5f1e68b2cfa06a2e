"""A dense mask may be of integers, on any device: 0 leaves a key out, any other value keeps it."""

import dataclasses
import itertools

import pytest
import torch
import wrapper_options
from planned_cases import check_run, unplanned
from preflash.testing import Case, MaskKind, build, runner

SINGLE = Case("single", (9,), (70,), 4, 2, 64, mask=MaskKind.CUSTOM)
PAGED = Case("paged", (5, 0, 33), (60, 7, 200), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
BATCHES = (PAGED, dataclasses.replace(PAGED, name="ragged", page_size=0))
DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def integers(mask: torch.Tensor):
    """Yields masks whose values' low bytes, or signs, would mean another mask."""
    for dtype, on_host in itertools.product(DTYPES, (False, True)):
        limits = torch.iinfo(dtype)
        kept = [1, -1, limits.min, limits.max, *(n for n in (1 << 8, 1 << 32) if n < limits.max)]
        values = torch.tensor(kept, dtype=dtype)[torch.arange(mask.numel()) % len(kept)]
        values = values.view(mask.shape).to(mask.device) * mask
        yield values.cpu() if on_host else values


def test_single(target):
    """A flat mask may be longer than the request's."""
    inputs = build(SINGLE, device=target.device)
    for mask in integers(inputs.masks[0]):
        flat = mask.flatten()
        for form in (mask, flat, torch.cat([flat, flat[:7]])):
            out, lse = runner.single(inputs, backend=target.backend, custom_mask=form)
            runner.compare(inputs, out, lse).check()


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.name)
def test_batches(target, case):
    """A mask of integers means its bools, also in the buffer of a graph."""
    inputs = build(case, device=target.device)
    for mask in integers(inputs.custom_mask):
        spare = torch.ones(7, dtype=mask.dtype, device=mask.device)
        runner.check(inputs, backend=target.backend, custom_mask=torch.cat([mask, spare]))
    graph_inputs, wrapper = unplanned(case, target, **wrapper_options.graph_options(inputs))
    runner.plan(wrapper, graph_inputs, custom_mask=inputs.custom_mask.int() * -256)
    check_run(graph_inputs, wrapper)
