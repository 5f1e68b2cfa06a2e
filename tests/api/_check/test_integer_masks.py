"""A dense mask may be of integers, on any device: 0 leaves a key out, any other value keeps it."""

import dataclasses

import pytest
import torch
import wrapper_options
from planned_cases import check_run, unplanned
from preflash.testing import Case, MaskKind, build, runner

SINGLE = Case("single", (9,), (70,), 4, 2, 64, mask=MaskKind.CUSTOM)
PAGED = Case("paged", (5, 0, 33), (60, 7, 200), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)

DTYPES = pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
PLACES = pytest.mark.parametrize("on_host", [False, True], ids=["device of q", "host"])


def integers(mask: torch.Tensor, dtype: torch.dtype, on_host: bool) -> torch.Tensor:
    """Makes values whose low byte, or sign, would mean another mask."""
    kept = [1, -1, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    kept += [256] if torch.iinfo(dtype).bits > 8 else []
    kept += [1 << 32] if torch.iinfo(dtype).bits > 32 else []
    values = torch.tensor(kept, dtype=dtype)[torch.arange(mask.numel()) % len(kept)]
    values = values.view(mask.shape).to(mask.device) * mask
    return values.cpu() if on_host else values


@DTYPES
@PLACES
def test_single(target, dtype, on_host):
    inputs = build(SINGLE, device=target.device)
    mask = integers(inputs.masks[0], dtype, on_host)
    for form in (mask, mask.flatten()):
        out, lse = runner.single(inputs, backend=target.backend, custom_mask=form)
        runner.compare(inputs, out, lse).check()


@DTYPES
@PLACES
@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
def test_batches(target, case, dtype, on_host):
    inputs = build(case, device=target.device)
    mask = integers(inputs.custom_mask, dtype, on_host)
    spare = torch.ones(7, dtype=dtype, device=mask.device)
    runner.check(inputs, backend=target.backend, custom_mask=torch.cat([mask, spare]))


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
def test_into_the_buffer_of_a_graph(target, case):
    inputs = build(case, device=target.device)
    inputs, wrapper = unplanned(case, target, **wrapper_options.graph_options(inputs))
    mask = integers(inputs.custom_mask, torch.int32, False)
    runner.plan(wrapper, inputs, custom_mask=mask)
    check_run(inputs, wrapper)
