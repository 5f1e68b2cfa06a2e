"""Prefill and decode are one launch or two: docs/dev/experiments/prefill-beside-decode.md."""

from itertools import product

import numpy as np
import pytest
import support_table
from planned import indptr
from preflash import _core

CPU, SM80, SM90 = _core.Family.cpu, _core.Family.sm80, _core.Family.sm90


def options(causal, **changes):
    heads = {"num_qo_heads": 32, "num_kv_heads": 8, "causal": causal}
    dtypes = support_table.Dtypes(_core.DType.bfloat16, _core.DType.bfloat16)
    return support_table.plain_options(dtypes, 128, 128).replace(**{**heads, **changes})


def batch(qo_lens, kv_lens):
    qo, kv = (np.array(indptr(lens), "<i4") for lens in (qo_lens, kv_lens))
    arrays = _core.BatchArrays(qo.ctypes.data, kv.ctypes.data, 0, len(qo_lens))
    return _core.Batch(arrays, page_size=0)


def two_launches(prefill, decode, family=SM80, causal=True, **changes):
    return _core.prefer_two_launches(
        family, (options(causal, **changes), batch(*prefill)), (options(False), batch(*decode))
    )


# Requests and tokens of the prefill, requests and keys of the decode batch: two are faster.
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
)
def test_mixes(family, mix, changes, expected):
    (count, tokens), (requests, keys) = mix
    prefill = [tokens] * count, [tokens] * count
    decode = [1] * requests, [keys] * requests
    assert two_launches(prefill, decode, family, **changes) is expected


def test_a_prefill_that_leaves_sms_idle():
    """A chunk of 400 tokens beside few long requests does not fill fa3's SMs."""
    few = [1] * 5, [12_000] * 5
    for family, tokens in product((SM80, SM90), (400, 800)):
        idle = family == SM90 and tokens == 400
        assert two_launches(([tokens], [tokens + 5000]), few, family) is idle


def test_requests_without_tokens_or_keys_count_nothing():
    alone, others = ([8192], [8192]), ([8192, 0, 0], [8192, 0, 100_000])
    for keys in (1024, 8192):
        decode = [1] * 32, [keys] * 32
        assert two_launches(alone, decode) is two_launches(others, decode)
