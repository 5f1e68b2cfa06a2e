"""Choice of one launch or two for prefill and decode, by the work of either side. The expectations
are the tables of docs/dev/experiments/prefill-beside-decode.md: one launch takes 0.90 to 0.94 (fa2)
and 0.85 to 0.94 (fa3) of the time of both at the first four mixes, and more than the time of both
at the last."""

import pytest
import support_table
import torch
from preflash import _core

CPU, SM80, SM90 = _core.Family.cpu, _core.Family.sm80, _core.Family.sm90


def options(causal, **changes):
    heads = {"num_qo_heads": 32, "num_kv_heads": 8, "causal": causal}
    dtypes = support_table._Dtypes(_core.DType.bfloat16, _core.DType.bfloat16)
    return support_table._usual(dtypes, 128, 128).replace(**{**heads, **changes})


def batch(requests, qo_len, kv_len):
    qo, kv = (torch.arange(requests + 1, dtype=torch.int32) * length for length in (qo_len, kv_len))
    return _core.Batch(_core.BatchArrays(qo.data_ptr(), kv.data_ptr(), 0, requests), page_size=0)


def apart(prefill, decode, family=SM80, causal=True, **changes):
    """prefill: requests and tokens; decode: requests and keys."""
    count, tokens = prefill
    requests, keys = decode
    return _core.prefer_two_launches(
        family,
        (options(causal, **changes), batch(count, tokens, tokens)),
        (options(False), batch(requests, 1, keys)),
    )


MEASURED = {
    ((2, 2048), (128, 2048)): False,
    ((1, 2048), (128, 2048)): False,
    ((1, 4096), (128, 4096)): False,
    ((1, 4096), (128, 8192)): False,
    ((1, 512), (64, 8192)): True,
    ((1, 8192), (32, 1024)): True,
}
NARROW = {"head_dim_qk": 64, "head_dim_vo": 64}
EIGHTY = {"head_dim_qk": 80, "head_dim_vo": 80}
LONG, GQA = ((1, 8192), (32, 1024)), ((1, 4096), (128, 2048))


@pytest.mark.parametrize(
    ("family", "mix", "changes", "expected"),
    [
        *((family, mix, {}, two) for mix, two in MEASURED.items() for family in (SM80, SM90)),
        *((CPU, mix, {}, False) for mix in MEASURED),  # one launch never takes longer
        # The prefill takes 3 times as long as the decode batch on fa3, and 6 times on fa2.
        (SM80, ((1, 8192), (90, 2048)), {}, True),
        (SM90, ((1, 8192), (90, 2048)), {}, False),
        # With narrow heads one launch saves only the time between two launches on fa3.
        (SM90, GQA, {}, False),
        (SM90, GQA, NARROW, True),
        (SM80, GQA, NARROW, False),
        (SM90, GQA, EIGHTY, False),  # computed in kernels of 128
        (SM90, ((1, 512), (2, 512)), NARROW, False),
        # Little work is one launch.
        (SM80, ((1, 512), (1, 1)), {}, False),
        (SM80, ((1, 16), (8, 1024)), {}, False),
        (SM80, ((0, 0), (0, 0)), {}, False),
        # A window of 64 tokens leaves a 64th of the pairs, a chunk half of that: little work.
        (SM80, LONG, {"window_left": 64}, False),
        (SM80, LONG, {"chunk_size": 64}, False),
        (SM80, LONG, {"causal": False}, True),
        # Five times the query heads are five times the work of a prefill.
        (SM80, ((1, 5000), (128, 1024)), {}, False),
        (SM80, ((1, 5000), (128, 1024)), {"num_qo_heads": 160}, True),
    ],
    ids=str,
)
def test_mixes(family, mix, changes, expected):
    assert apart(*mix, family, **changes) is expected


def test_a_prefill_that_leaves_sms_idle():
    """Chunks of 400 tokens behind many keys, 12,800 rows, beside few long requests; twice as many
    are beside them again."""
    few = batch(5, 1, 12_000)
    for tokens, expected in ((400, True), (800, False)):
        chunk = batch(1, tokens, tokens + 5000)
        sides = (options(True), chunk), (options(False), few)
        assert _core.prefer_two_launches(SM90, *sides) is expected
        assert not _core.prefer_two_launches(SM80, *sides)


def test_requests_without_tokens_or_keys_count_nothing():
    qo = torch.tensor([0, 8192, 8192, 8192], dtype=torch.int32)
    kv = torch.tensor([0, 8192, 8192, 108192], dtype=torch.int32)
    prefill = _core.Batch(_core.BatchArrays(qo.data_ptr(), kv.data_ptr(), 0, 3), page_size=0)
    alone = batch(1, 8192, 8192)
    for keys in (1024, 8192):
        results = [
            _core.prefer_two_launches(
                SM80, (options(True), one), (options(False), batch(32, 1, keys))
            )
            for one in (prefill, alone)
        ]
        assert results[0] == results[1]
