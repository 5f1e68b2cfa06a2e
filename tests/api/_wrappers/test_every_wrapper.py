"""`variant` and `repr()` of every public wrapper: "not planned" before plan(), then the kernels."""

import inspect
from collections.abc import Callable

import preflash
import pytest
import torch
from preflash import _core
from preflash.testing import runner

HEADS = (4, 2, 64)  # query heads, KV heads, head_dim
PAGE = 16
KEYS = (5, 16)  # of two requests of one query, a page each
Plan = Callable[[], None]


def public_wrappers() -> set[str]:
    return {name for name in preflash.__all__ if inspect.isclass(getattr(preflash, name))}


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


QO = index(0, 1, 2)
TABLE = (index(0, 1, 2), index(0, 1), index(*KEYS))  # indptr, pages, keys of the last page
DTYPE = {"q_data_type": torch.bfloat16}


def made(name: str, device: str) -> tuple[object, Plan]:
    """A wrapper and its plan()."""
    kind, buffer = getattr(preflash, name), runner.workspace(device)
    if name == "BatchAttention":
        wrapper = kind("NHD", device)
        return wrapper, lambda: wrapper.plan(QO, *TABLE[:2], index(*KEYS), *HEADS, 64, PAGE)
    if name == "BatchPrefillWithRaggedKVCacheWrapper":
        wrapper = kind(buffer)
        return wrapper, lambda: wrapper.plan(QO, index(0, 5, 21), *HEADS, **DTYPE)
    if name == "BatchPrefillWithCausalBidirectionalRangesWrapper":
        wrapper = kind(buffer, head_dim_qk=64, head_dim_vo=64)
        return wrapper, lambda: wrapper.plan(QO, *TABLE, *HEADS, PAGE)
    if name == "BatchAttentionWithAttentionSinkWrapper":
        wrapper = kind(buffer, head_dim_qk=64, head_dim_vo=64)
        return wrapper, lambda: wrapper.plan(QO, *TABLE, *HEADS, PAGE, **DTYPE)
    if name == "BatchPrefillWithPagedKVCacheWrapper":
        wrapper = kind(buffer)
        return wrapper, lambda: wrapper.plan(QO, *TABLE, *HEADS, PAGE, **DTYPE)
    if name in ("BatchDecodeWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"):
        wrapper = kind(buffer)
        return wrapper, lambda: wrapper.plan(*TABLE, *HEADS, PAGE, **DTYPE)
    if name == "CUDAGraphBatchDecodeWithPagedKVCacheWrapper":
        wrapper = kind(buffer, *(array.to(device) for array in TABLE))
        return wrapper, lambda: wrapper.plan(*TABLE, *HEADS, PAGE, **DTYPE)
    if name == "BatchPODWithPagedKVCacheWrapper":
        wrapper = kind(buffer)
        return wrapper, lambda: wrapper.plan(QO, *TABLE, QO, *TABLE, *HEADS, PAGE, **DTYPE)
    if name == "MultiLevelCascadeAttentionWrapper":
        wrapper = kind(2, buffer)
        shared = (index(0, 2), index(0, 1), index(2), index(PAGE))
        levels = [list(pair) for pair in zip(shared, (QO, *TABLE), strict=True)]
        return wrapper, lambda: wrapper.plan(*levels, *HEADS, PAGE, **DTYPE)
    if name == "BatchDecodeWithSharedPrefixPagedKVCacheWrapper":
        wrapper = kind(buffer)
        return wrapper, lambda: wrapper.begin_forward(*TABLE, *HEADS, PAGE, "bfloat16")
    if name == "BatchPrefillWithSharedPrefixPagedKVCacheWrapper":
        wrapper = kind(buffer)
        return wrapper, lambda: wrapper.begin_forward(QO, *TABLE, *HEADS, PAGE, **DTYPE)
    if name == "BlockSparseAttentionWrapper":
        wrapper = kind(buffer)
        blocks = (index(0, 1), index(1), 16, 32, 16, 16)
        options = {"q_data_type": "bf16", "o_data_type": "bf16"}
        return wrapper, lambda: wrapper.plan(*blocks, *HEADS, **options)
    if name == "VariableBlockSparseAttentionWrapper":
        wrapper = kind(buffer)
        kept, rows, columns = torch.ones(2, 1, 2), index(16), index(16, 8)
        blocks = (kept.bool(), rows.expand(2, -1), columns.expand(2, -1))
        return wrapper, lambda: wrapper.plan(*blocks, *HEADS, **DTYPE)
    raise AssertionError(f"{name} is new: say here how it is made and planned")


@pytest.mark.parametrize("name", sorted(public_wrappers()))
def test_says_what_it_is(name):
    wrapper, plan = made(name, "cuda" if torch.cuda.is_available() else "cpu")
    assert wrapper.variant is None
    assert repr(wrapper).startswith(f"{name}(")
    assert "not planned" in repr(wrapper)
    plan()
    ids = wrapper.variant.split(", ")
    assert len(ids) == (2 if name == "MultiLevelCascadeAttentionWrapper" else 1)
    assert set(ids) <= {kernel["id"] for kernel in _core.kernels()}
    assert f"variant={wrapper.variant!r}" in repr(wrapper)
    assert "not planned" not in repr(wrapper)
    with pytest.raises(AttributeError):
        wrapper.variant = "another"


def test_levels_out_of_step_have_no_variant(monkeypatch):
    """An interrupt between the plans of two levels: run() refuses."""
    wrapper, plan = made("MultiLevelCascadeAttentionWrapper", "cpu")
    plan()

    def interrupted(plan, copy_in):
        raise KeyboardInterrupt

    monkeypatch.setattr(wrapper._levels[1], "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan()
    assert wrapper.variant is None
    assert "not planned" in repr(wrapper)
