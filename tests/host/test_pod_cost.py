"""Choice of one launch or two for prefill and decode, by the work of either side. The expectations
are the tables of docs/dev/experiments/prefill-beside-decode.md: one launch takes 0.90 to 0.94 (fa2)
and 0.85 to 0.94 (fa3) of the time of both at the first four mixes, and more than the time of both
at the last."""

import pytest
import torch
from preflash import _core

DTYPE = _core.DType.bfloat16
FAMILIES = _core.Family


def options(causal, **changes):
    plain = {
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "q_dtype": DTYPE,
        "kv_dtype": DTYPE,
        "o_dtype": DTYPE,
        "causal": causal,
        "window_left": -1,
        "mask": _core.Mask.bounds,
        "position": _core.Position.none,
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "soft_cap": 0.0,
        "fixed_split_size": 0,
        "disable_split": False,
    }
    return _core.AttentionOptions(**{**plain, **changes})


def batch(requests, qo_len, kv_len):
    qo, kv = (torch.arange(requests + 1, dtype=torch.int32) * length for length in (qo_len, kv_len))
    return _core.Batch(_core.BatchArrays(qo.data_ptr(), kv.data_ptr(), 0, requests), page_size=0)


def apart(prefill, decode, family=FAMILIES.sm80, causal=True, **changes):
    """prefill: requests and tokens; decode: requests and keys."""
    count, tokens = prefill
    requests, keys = decode
    return _core.prefer_two_launches(
        family,
        (options(causal, **changes), batch(count, tokens, tokens)),
        (options(False), batch(requests, 1, keys)),
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((2, 2048), (128, 2048), False),
        ((1, 2048), (128, 2048), False),
        ((1, 4096), (128, 4096), False),
        ((1, 4096), (128, 8192), False),
        ((1, 512), (64, 8192), True),
        ((1, 8192), (32, 1024), True),
    ],
)
def test_measured_mixes(prefill, decode, expected):
    for family in (FAMILIES.sm80, FAMILIES.sm90):
        assert apart(prefill, decode, family) is expected
    assert not apart(prefill, decode, FAMILIES.cpu)  # whose one launch never takes longer


def test_each_family_has_its_own_bounds():
    """The prefill takes 3 times as long as the decode batch on fa3, and 6 times as long on fa2."""
    mix = (1, 8192), (90, 2048)
    assert apart(*mix, FAMILIES.sm80)
    assert not apart(*mix, FAMILIES.sm90)


def test_narrow_heads_on_fa3():
    """One launch saves only the time between two launches there."""
    narrow = {"head_dim_qk": 64, "head_dim_vo": 64}
    mix = (1, 4096), (128, 2048)
    assert not apart(*mix, FAMILIES.sm90)
    assert apart(*mix, FAMILIES.sm90, **narrow)
    assert not apart(*mix, FAMILIES.sm80, **narrow)
    # Computed in kernels of 128, which do gain.
    assert not apart(*mix, FAMILIES.sm90, head_dim_qk=80, head_dim_vo=80)
    assert not apart((1, 512), (2, 512), FAMILIES.sm90, **narrow)


def test_a_prefill_that_leaves_sms_idle():
    """Chunks of 400 tokens behind many keys, 12,800 rows, beside few long requests; twice as many
    are beside them again."""
    few = batch(5, 1, 12_000)
    for tokens, expected in ((400, True), (800, False)):
        chunk = batch(1, tokens, tokens + 5000)
        sides = (options(True), chunk), (options(False), few)
        assert _core.prefer_two_launches(FAMILIES.sm90, *sides) is expected
        assert not _core.prefer_two_launches(FAMILIES.sm80, *sides)


def test_little_work_is_one_launch():
    assert not apart((1, 512), (1, 1))
    assert not apart((1, 16), (8, 1024))
    assert not apart((0, 0), (0, 0))


def test_what_a_mask_leaves_is_what_counts():
    assert apart((1, 8192), (32, 1024))
    # A window of 64 tokens leaves a 64th of the pairs, a chunk half of that: little work.
    assert not apart((1, 8192), (32, 1024), window_left=64)
    assert not apart((1, 8192), (32, 1024), chunk_size=64)
    assert apart((1, 8192), (32, 1024), causal=False)
    # Five times the query heads are five times the work of a prefill.
    assert not apart((1, 5000), (128, 1024))
    assert apart((1, 5000), (128, 1024), num_qo_heads=160)


def test_requests_without_tokens_or_keys_count_nothing():
    qo = torch.tensor([0, 8192, 8192, 8192], dtype=torch.int32)
    kv = torch.tensor([0, 8192, 8192, 108192], dtype=torch.int32)
    prefill = _core.Batch(_core.BatchArrays(qo.data_ptr(), kv.data_ptr(), 0, 3), page_size=0)
    alone = batch(1, 8192, 8192)
    for keys in (1024, 8192):
        results = [
            _core.prefer_two_launches(
                FAMILIES.sm80, (options(True), one), (options(False), batch(32, 1, keys))
            )
            for one in (prefill, alone)
        ]
        assert results[0] == results[1]
