"""Benchmark inputs hold what they say, and samples of their rows those rows."""

import dataclasses
import itertools

import pytest
import torch
from preflash.cli.batches import Sample, batches
from preflash.testing import Case, KvForm, MaskKind, build, reference

CPU = torch.device("cpu")
PAGED = Case("paged", (5, 0, 1, 40), (33, 7, 16, 40), 8, 2, 64, page_size=16,
             form=KvForm.COMBINED, mask=MaskKind.CAUSAL)  # fmt: skip


def test_paged_sets_differ_and_share_their_page_table():
    """Owned slots are finite, and the others NaN."""
    first, second = itertools.islice(batches(PAGED, CPU, seed=3), 2)
    assert first.page_table == second.page_table
    assert not torch.equal(first.q, second.q)
    assert first.kv_indptr.tolist() == [0, 3, 4, 5, 8]
    assert first.last_page_len.tolist() == [1, 7, 16, 8]
    assert len(set(first.indices.tolist())) == 8
    owned = 0
    for index, kv_len in enumerate(PAGED.kv_lens):
        k, v = first.request(index).k, first.request(index).v
        assert k.shape == (kv_len, 2, 64)
        assert bool((k.isfinite() & v.isfinite()).all())
        assert not torch.equal(k, v)
        owned += k.numel() + v.numel()
    assert int(first.cache.isfinite().sum()) == owned
    assert int(first.cache.isnan().sum()) == first.cache.numel() - owned
    with pytest.raises(ValueError, match="has a custom mask"):
        next(batches(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), CPU))


def test_a_sample_is_those_rows_of_the_whole_answer():
    inputs = build(PAGED)
    sample = Sample(PAGED.qo_lens, 3, seed=1)
    whole, some = reference(inputs), sample.expected(inputs)
    assert len(sample) == some.out.shape[0]
    assert torch.equal(sample.of(whole.lse), some.lse)
    torch.testing.assert_close(sample.of(whole.out), some.out, rtol=0, atol=1e-13)
    # First and last rows of a request are among them; short requests are there whole.
    assert [rows.tolist()[:1] for rows in sample.rows] == [[0], [], [0], [0]]
    assert sample.rows[0][-1] == 4
    assert sample.rows[3][-1] == 39
