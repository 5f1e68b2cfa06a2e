"""A plan copies what its kernel would convert for every query tile where copies were faster."""

from itertools import product

import pytest
from planned import planner, ragged
from preflash import _core

F16, BF16, E4M3 = _core.DType.float16, _core.DType.bfloat16, _core.DType.float8_e4m3fn
ROPE, FP8 = {"position": _core.Position.rope}, {"kv_dtype": E4M3}
HEADS = {"num_qo_heads": 16, "num_kv_heads": 16, "tile_m": 128}
SM80, SM90, CAUSAL = {"family": "sm80"}, {"family": "sm90"}, {"causal": True}
GQA = {"num_qo_heads": 16, "num_kv_heads": 4}
SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64}
LONG, CACHED, PROMPTS = ([16384], [16384]), [8192] * 8, [1024] * 8


def of(head_dim_qk, head_dim_vo=None):
    return SM90 | {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo or head_dim_qk}


def prefers(qo_lens, kv_lens, **options) -> bool:
    return planner.prefers_prepass(**ragged(qo_lens, kv_lens, **HEADS | options))


@pytest.mark.parametrize("what", [ROPE, FP8, ROPE | FP8], ids=["rope", "fp8", "both"])
def test_copies_are_faster_where_many_tiles_read_them(what):
    for lengths, mask, family in product(
        (LONG, ([4096] * 4, [4096] * 4)), ({}, CAUSAL), (SM80, SM90)
    ):
        assert prefers(*lengths, **what, **mask, **family)
    # Few tiles read the keys: decode, one tile, little of anything.
    assert not prefers([1] * 64, [4096] * 64, **what)
    assert not prefers([128], [65536], **what)
    assert not prefers([100], [100], **what)
    assert not prefers([9, 3], [30, 5], **what, **SM90, **SMALL)
    assert not prefers([0, 0], [5000, 0], **what)
    assert not prefers([], [], **what)


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "options", "expected"),
    [
        # Groups of heads are rows: 64 tiles for each KV head.
        ([512], [16384], CAUSAL | ROPE | {"num_qo_heads": 64, "num_kv_heads": 4}, True),
        ([64], [16384], CAUSAL | ROPE | {"num_kv_heads": 4}, False),
        # A window leaves most keys to few tiles.
        ([2048], [65536], CAUSAL | ROPE, True),
        ([2048], [65536], CAUSAL | ROPE | {"window_left": 1024}, False),
        ([2048], [65536], CAUSAL | ROPE | {"chunk_size": 1024}, False),
        # Results that no batch may change have none.
        (*LONG, ROPE | {"fixed_split_size": 2048}, False),
        (*LONG, ROPE | {"disable_split_kv": True}, False),
        (*LONG, ROPE | {"family": "cpu"}, False),
        # The policy comes first.
        (*LONG, ROPE | {"prepass": _core.Prepass.never}, False),
        ([1], [1], ROPE | {"prepass": _core.Prepass.always, "disable_split_kv": True}, True),
        # At 512: bf16 over e4m3 in docs/dev/experiments/head-dim-512.md.
        (PROMPTS, PROMPTS, FP8 | CAUSAL | of(512), True),
        ([256] * 8, CACHED, FP8 | GQA | of(512), True),
        ([128] * 8, CACHED, FP8 | GQA | of(512), False),
        # At 192 and 256: docs/dev/experiments/fp8-and-rope.md.
        *(([64] * 8, CACHED, FP8 | GQA | dims, False) for dims in (of(256), of(192, 128))),
        ([128] * 8, CACHED, FP8 | GQA | of(256), False),
        ([128] * 8, CACHED, FP8 | GQA | of(192, 128), True),
        *(([256] * 8, CACHED, FP8 | GQA | dims, True) for dims in (of(256), of(192, 128))),
        *(([64] * 8, CACHED, ROPE | GQA | dims, True) for dims in (of(256), of(192, 128))),
        *(
            (PROMPTS, PROMPTS, CAUSAL | GQA | what | dims, True)
            for what in (FP8, ROPE)
            for dims in (of(256), of(192, 128))
        ),
        # (128, 64) is converted by the kernel of 128, with its costs.
        *(([128] * 8, CACHED, FP8 | GQA | of(128, vo), False) for vo in (64, 128)),
    ],
)
def test_choice(qo_lens, kv_lens, options, expected):
    assert prefers(qo_lens, kv_lens, **options) == expected


def test_copies_with_fewer_bits_than_a_kernel_keeps_are_not_made():
    """A kernel rotates 8-bit queries and keys into float16, copies have the output's dtype."""
    options = CAUSAL | {"q_dtype": E4M3, "kv_dtype": E4M3}
    for output in (BF16, F16):
        assert prefers(*LONG, **options, o_dtype=output)
        assert prefers(*LONG, **options, **ROPE, o_dtype=output) == (output == F16)


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "num_kv_heads", "faster"),
    [
        ([1024] * 16, [1024] * 16, 32, False),
        ([2048] * 8, [2048] * 8, 32, False),
        ([4096] * 4, [4096] * 4, 32, True),
        ([512] * 8, [8192] * 8, 8, True),
        ([64] * 8, [8192] * 8, 8, False),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_of_8_bits_beside_copies(head_dim, qo_lens, kv_lens, num_kv_heads, faster):
    """16 bits on copies are faster at head_dim 64 alone: docs/dev/experiments/fp8-products.md."""
    options = CAUSAL | of(head_dim) | {"num_qo_heads": 32, "num_kv_heads": num_kv_heads}
    dtypes = {"q_dtype": E4M3, "kv_dtype": E4M3, "o_dtype": BF16}
    found = prefers(qo_lens, kv_lens, multiplies_8_bits=True, **options, **dtypes)
    assert found == (faster and head_dim == 64)
