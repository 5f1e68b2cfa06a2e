"""The CPU backend agrees with the oracle in every core case, and far away in memory."""

import dataclasses

import attention_cases
import converted_cases
import far_memory
import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner

# float32, and one of the dtypes that are converted.
DTYPES = ((torch.float32, torch.float16), (torch.float32, torch.bfloat16))
CORE = [
    case.with_dtype(dtype)
    for index, case in enumerate(attention_cases.core())
    for dtype in DTYPES[index % 2]
]


@pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)
def test_core(case):
    runner.check(build(case), backend="cpu")


@pytest.mark.parametrize("case", converted_cases.CASES[::12], ids=lambda case: case.id)
def test_operands_that_are_rotated_or_dequantised_on_load(case):
    few_keys = tuple(min(kv_len, 1100) for kv_len in case.kv_lens)  # the planner splits these, too
    inputs = build(dataclasses.replace(case, kv_lens=few_keys))
    wrapper = runner.planned(inputs, backend="cpu")
    assert "prepass+" not in wrapper.variant
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_offsets_over_2_31():
    """Pages of a pool of more than 2^31 elements, whose untouched pages cost no memory."""
    case = Case("huge", (9, 1), (130, 33), 4, 2, 128, page_size=16, mask=MaskKind.CAUSAL)
    inputs = build(case)
    pages = 2**31 // (16 * 2 * 128) + 1000
    try:
        pools = [torch.empty(pages, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    except RuntimeError:
        pytest.skip("not enough address space")
    far_memory.move_pages(inputs, pools, pages - 1 - 37 * torch.arange(inputs.k.shape[0]))
    runner.check(inputs, backend="cpu")


def test_ragged_offsets_over_2_31():
    """Token strides so large that the offset of the last row passes 2^31 elements."""
    tokens, stride = 40, 2**31 // 39 // 64 * 64 + 64
    inputs = build(Case("far", (9,), (tokens,), 2, 1, 64, mask=MaskKind.CAUSAL))
    for name in ("k", "v"):
        storage = torch.empty(tokens * stride, dtype=torch.bfloat16)
        view = storage.as_strided((tokens, 1, 64), (stride, 64, 1))
        setattr(inputs, name, view.copy_(getattr(inputs, name)[:tokens]))
    runner.check(inputs, backend="cpu")
