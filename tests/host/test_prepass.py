"""When a plan copies what its kernel would convert for every query tile."""

import pytest
from planned import planner, ragged
from preflash import _core

ROPE = {"position": _core.Position.rope}
FP8 = {"kv_dtype": _core.DType.float8_e4m3fn}
HEADS = {"num_qo_heads": 16, "num_kv_heads": 16, "tile_m": 128}


def prefers(qo_lens, kv_lens, **options) -> bool:
    return planner.prefers_prepass(**ragged(qo_lens, kv_lens, **(HEADS | options)))


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", [ROPE, FP8, ROPE | FP8], ids=["rope", "fp8", "both"])
def test_long_prefill_has_a_prepass(what, causal, family):
    assert prefers([16384], [16384], causal=causal, family=family, **what)
    assert prefers([4096] * 4, [4096] * 4, causal=causal, family=family, **what)


@pytest.mark.parametrize("what", [ROPE, FP8, ROPE | FP8], ids=["rope", "fp8", "both"])
def test_keys_that_few_tiles_read_are_not(what):
    assert not prefers([1] * 64, [4096] * 64, **what)  # decode
    assert not prefers([128], [65536], **what)  # one tile
    assert not prefers([100], [100], **what)  # little of anything
    small = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    assert not prefers([9, 3], [30, 5], family="sm90", **what, **small)
    assert not prefers([0, 0], [5000, 0], **what)
    assert not prefers([], [], **what)


def test_groups_of_heads_are_rows():
    grouped = {"num_qo_heads": 64, "num_kv_heads": 4}
    assert prefers([512], [16384], causal=True, **ROPE, **grouped)  # 64 tiles for each KV head
    assert not prefers([64], [16384], causal=True, **ROPE, **(HEADS | {"num_kv_heads": 4}))


def test_a_window_leaves_most_keys_to_few_tiles():
    assert prefers([2048], [65536], causal=True, **ROPE)
    assert not prefers([2048], [65536], causal=True, window_left=1024, **ROPE)
    assert not prefers([2048], [65536], causal=True, chunk_size=1024, **ROPE)


@pytest.mark.parametrize("output", ["bfloat16", "float16"])
@pytest.mark.parametrize("what", [{}, ROPE], ids=["widened", "rotated"])
def test_copies_with_fewer_bits_than_a_kernel_would_leave_are_not_made(what, output):
    """A kernel rotates 8-bit queries and keys into float16, copies have the output's dtype."""
    dtypes = {
        "q_dtype": _core.DType.float8_e4m3fn,
        "kv_dtype": _core.DType.float8_e4m3fn,
        "o_dtype": getattr(_core.DType, output),
    }
    fewer = bool(what) and output == "bfloat16"
    assert prefers([16384], [16384], causal=True, **dtypes, **what) != fewer


@pytest.mark.parametrize("split", [{"fixed_split_size": 2048}, {"disable_split_kv": True}])
def test_results_that_no_batch_changes_have_no_prepass(split):
    assert not prefers([16384], [16384], **ROPE, **split)


def test_the_cpu_rotates_what_it_loads():
    assert not prefers([16384], [16384], family="cpu", **ROPE)


def test_the_policy_comes_first():
    never, always = _core.Prepass.never, _core.Prepass.always
    assert not prefers([16384], [16384], prepass=never, **ROPE)
    assert prefers([1], [1], prepass=always, disable_split_kv=True, **ROPE)


WIDE = {"family": "sm90", "head_dim_qk": 512, "head_dim_vo": 512}


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "options", "pays"),
    [
        ([1024] * 8, [1024] * 8, {"num_qo_heads": 16, "num_kv_heads": 16, "causal": True}, True),
        ([256] * 8, [8192] * 8, {"num_qo_heads": 16, "num_kv_heads": 4}, True),
        ([128] * 8, [8192] * 8, {"num_qo_heads": 16, "num_kv_heads": 4}, False),
    ],
)
def test_what_is_faster_at_512(qo_lens, kv_lens, options, pays):
    """bf16 over e4m3 as measured: docs/dev/experiments/head-dim-512.md."""
    assert prefers(qo_lens, kv_lens, **FP8, **WIDE, **options) == pays


OF_256 = {"family": "sm90", "head_dim_qk": 256, "head_dim_vo": 256}
OF_192 = {"family": "sm90", "head_dim_qk": 192, "head_dim_vo": 128}


@pytest.mark.parametrize("head_dims", [OF_256, OF_192], ids=["256", "192x128"])
@pytest.mark.parametrize(
    ("what", "queries", "pays"),
    [
        (FP8, 64, {256: False, 192: False}),
        (FP8, 128, {256: False, 192: True}),
        (FP8, 256, {256: True, 192: True}),
        (ROPE, 64, {256: True, 192: True}),
    ],
)
def test_what_is_faster_between_128_and_256(head_dims, what, queries, pays):
    """Expects the faster path of the measurements in docs/dev/experiments/fp8-and-rope.md."""
    heads = {"num_qo_heads": 16, "num_kv_heads": 4}
    expected = pays[head_dims["head_dim_qk"]]
    assert prefers([queries] * 8, [8192] * 8, **what, **head_dims, **heads) == expected
    assert prefers([1024] * 8, [1024] * 8, causal=True, **what, **head_dims, **heads)


def test_values_that_are_narrower_than_keys_have_the_costs_of_their_kernel():
    """(128, 64) is converted by the kernel of 128."""
    sizes = {"family": "sm90", "num_qo_heads": 16, "num_kv_heads": 4}
    for narrow in (64, 128):
        assert not prefers(
            [128] * 8, [8192] * 8, **FP8, head_dim_qk=128, head_dim_vo=narrow, **sizes
        )


E4M3 = _core.DType.float8_e4m3fn


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "num_kv_heads", "pays"),
    [
        ([1024] * 16, [1024] * 16, 32, False),
        ([2048] * 8, [2048] * 8, 32, False),
        ([4096] * 4, [4096] * 4, 32, True),
        ([512] * 8, [8192] * 8, 8, True),
        ([64] * 8, [8192] * 8, 8, False),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_of_8_bits_beside_copies(head_dim, qo_lens, kv_lens, num_kv_heads, pays):
    """16 bits on copies are faster at head_dim 64 alone: docs/dev/experiments/fp8-products.md."""
    dtypes = {"q_dtype": E4M3, "kv_dtype": E4M3, "o_dtype": _core.DType.bfloat16}
    heads = {"num_qo_heads": 32, "num_kv_heads": num_kv_heads}
    sizes = {"head_dim_qk": head_dim, "head_dim_vo": head_dim, "family": "sm90"}
    found = prefers(
        qo_lens, kv_lens, multiplies_8_bits=True, causal=True, **dtypes, **heads, **sizes
    )
    assert found == (pays and head_dim == 64)
