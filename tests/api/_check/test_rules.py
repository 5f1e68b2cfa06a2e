"""The rules of tensors and sizes: each column of every row refuses a tensor that breaks it."""

from __future__ import annotations

import pytest
import torch
from preflash._check import validate
from preflash._check.rules import RANGES, TENSORS

CPU = torch.device("cpu")
SHAPE = r"argument has shape .*; must be [\[(o]"
SIZES = {
    "num_qo_heads": 8, "num_kv_heads": 4, "head_dim_qk": 64, "head_dim_vo": 32, "page_size": 16,
    "rows of q": 5, "qo_indptr[-1]": 3, "kv_indptr[-1]": 7, "batch_size": 2, "batch_size + 1": 3,
    "pages": 6, "nnz": 9, "seq_len": 10,
}  # fmt: skip
NAMED_DTYPES = {
    name: torch.float16
    for rule in TENSORS.values()
    for name in rule.dtype
    if not hasattr(torch, name) and name not in ("integer", "floating")
}
KNOWN = {**SIZES, **NAMED_DTYPES}


def good(rule: str) -> torch.Tensor:
    """A tensor that conforms to a rule, a minimum exceeded by 1."""
    row = TENSORS[rule]
    shape = [
        int(dim) if dim.isdigit() else SIZES.get(dim.removesuffix("+"), 16) + dim.endswith("+")
        for dim in row.shape or ("any",)
    ]
    first = {"integer": "int64", "floating": "float32"}
    name = first.get(row.dtype[0], row.dtype[0]) if row.dtype else "float32"
    return torch.zeros(shape, dtype=NAMED_DTYPES.get(name) or getattr(torch, name))


def accepted(rule: str, value: torch.Tensor, **known) -> None:
    assert validate.conforms("argument", value, rule, CPU, {**KNOWN, **known}) is value


def refused(kind: type[Exception], match: str, rule: str, value: torch.Tensor, **known) -> None:
    with pytest.raises(kind, match=match):
        validate.conforms("argument", value, rule, CPU, {**KNOWN, **known})


def rules_with(column: str):
    """Marks a test of the rules of which a column is filled."""
    return pytest.mark.parametrize(
        "rule", [n for n, row in TENSORS.items() if getattr(row, column)]
    )


@pytest.mark.parametrize("rule", TENSORS)
def test_conforming_tensors_are_returned(rule):
    accepted(rule, good(rule))
    refused(ValueError, "meta", rule, good(rule).to("meta"))


@rules_with("dtype")
def test_another_dtype_is_refused(rule):
    value = good(rule).to(torch.complex64)
    refused(TypeError, "^argument is torch.complex64; must be", rule, value)


@rules_with("shape")
def test_another_shape_is_refused(rule):
    row, value = TENSORS[rule], good(rule)
    refused(ValueError, SHAPE, rule, value[None])
    for i, dim in enumerate(row.shape):
        size = int(dim) if dim.isdigit() else SIZES.get(dim.removesuffix("+"))
        if size is None:
            continue
        wrong = value.narrow(i, 0, size - 1).clone()
        refused(ValueError, SHAPE, rule, wrong)
        longer = torch.cat([value, value], i)
        if dim.endswith("+"):
            accepted(rule, longer)
        else:
            refused(ValueError, SHAPE, rule, longer)


@rules_with("kv_layout")
def test_layouts_exchange_tokens_and_heads(rule):
    value = good(rule)
    swapped = value.transpose(-3, -2).contiguous()
    accepted(rule, swapped, kv_layout="HND")
    if TENSORS[rule].dtype:  # whose sizes the call knows
        refused(ValueError, "the shape fits HND", rule, swapped)
        refused(ValueError, "the shape fits NHD", rule, value, kv_layout="HND")


@rules_with("memory")
def test_other_strides_are_refused(rule):
    value = good(rule)
    strided = torch.stack([value, value], -1)[..., 0]
    refused(ValueError, "argument has strides? ", rule, strided)
    if TENSORS[rule].memory in ("rows", "aligned"):
        room = torch.zeros(value.numel() + 1, dtype=value.dtype)
        late = room[1:].view(value.shape)
        refused(ValueError, "16", rule, late)


@rules_with("written")
def test_overlapping_outputs_are_refused(rule):
    value = good(rule)
    refused(ValueError, "its elements overlap", rule, value[:1].expand(value.shape))


def test_a_size_that_the_call_does_not_know_is_free():
    value = torch.zeros(3, 5, 8, dtype=torch.float16)
    assert validate.conforms("k", value, known={"num_kv_heads": 5}) is value
    with pytest.raises(ValueError, match=r"must be \(3, 4, 8\): \[at least kv_indptr"):
        validate.conforms("k", value, known={"num_kv_heads": 4})


@pytest.mark.parametrize("name", RANGES)
def test_sizes_outside_their_range_are_refused(name):
    least, most = RANGES[name]
    for value in (least, most):
        assert validate.size(name, value) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=rf"{name}={value}: must be in \[{least}, {most}\]"):
            validate.size(name, value)
    for value in (True, 1.0, None):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            validate.size(name, value)
