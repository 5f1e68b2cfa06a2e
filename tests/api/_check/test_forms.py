"""Tensors of another dtype, shape or stride than a call documents are refused by name."""

import preflash
import pytest
import torch

V, S, INT = torch.ones(3, 2, 8), torch.ones(3, 2), torch.int32
ONE, INDPTR = torch.zeros(1, dtype=INT), torch.tensor([0, 1], dtype=INT)
ROWS = torch.ones(3, 2, 64).to(torch.float8_e4m3fn)
FACTORS = {f"scale_{name}": torch.ones(2) for name in "qkv"}
TABLE = {"kv_indices": ONE, "kv_indptr": INDPTR, "kv_last_page_len": ONE + 1}
PLACES = {"batch_indices": ONE, "positions": ONE}
SIZES = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 64}


def plan(name: str, **fixed):
    wrapper = getattr(preflash, name)(torch.empty(1 << 20, dtype=torch.uint8))
    return lambda **given: wrapper.plan(**fixed, **SIZES, **given)


# A call, its tensors, and the names of those that are spoilt one at a time.
CALLS = {
    "merge_state": (preflash.merge_state, {"v_a": V, "s_a": S, "v_b": V, "s_b": S}, None),
    "merge_states": (
        preflash.merge_states, {"v": torch.ones(3, 2, 2, 8), "s": torch.ones(3, 2, 2)}, None,
    ),
    "merge_state_in_place": (
        preflash.merge_state_in_place,
        {"v": V, "s": S, "v_other": V.clone(), "s_other": S.clone(), "mask": S[:, 0] > 0}, None,
    ),
    "single": (
        preflash.single_prefill_with_kv_cache, {"q": ROWS, "k": ROWS, "v": ROWS, **FACTORS},
        tuple(FACTORS),
    ),
    "append": (
        lambda **given: preflash.append_paged_kv_cache(V[:1], V[:1], **given),
        {**PLACES, "paged_kv_cache": torch.zeros(2, 2, 4, 2, 8), **TABLE}, (*PLACES, *TABLE),
    ),
    "get_seq_lens": (
        lambda **given: preflash.get_seq_lens(**given, page_size=4),
        {"kv_indptr": INDPTR, "kv_last_page_len": ONE + 1}, None,
    ),
    "block sparse": (
        plan("BlockSparseAttentionWrapper", M=16, N=16, R=16, C=16),
        {"indptr": INDPTR, "indices": ONE}, None,
    ),
    "block sizes": (
        plan("VariableBlockSparseAttentionWrapper"),
        {"block_mask_map": torch.ones(2, 1, 1).bool(), "block_row_sz": torch.full((2, 1), 3),
         "block_col_sz": torch.full((2, 1), 3)}, None,
    ),
}  # fmt: skip
ROWS_OF_CALLS = [
    pytest.param(call, given, name, id=f"{key} {name}")
    for key, (call, given, names) in CALLS.items()
    for name in names or given
]


@pytest.mark.parametrize(("call", "given", "name"), ROWS_OF_CALLS)
def test_another_dtype_or_shape(call, given, name):
    call(**given)
    with pytest.raises(TypeError, match=rf"\b{name} is torch.complex64"):
        call(**{**given, name: given[name].cfloat()})
    with pytest.raises(ValueError, match=rf"\b{name} has shape"):
        call(**{**given, name: given[name][None, None]})


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("merge_state_in_place", "v"),
        ("merge_state_in_place", "s"),
        *(("single", n) for n in FACTORS),
    ],
)
def test_other_strides(key, name):
    call, given, _ = CALLS[key]
    strided = torch.stack([given[name], given[name]], -1)[..., 0]
    with pytest.raises(ValueError, match=rf"\b{name} has stride"):
        call(**{**given, name: strided})
