"""Benchmark inputs hold what they say, and torch computes the oracle's answer on them."""

import dataclasses
import itertools

import pytest
import torch
from preflash.cli.batches import Sample, batches
from preflash.cli.bench import rows as bench_rows
from preflash.cli.bench.baselines import baselines_of
from preflash.testing import Case, KvForm, MaskKind, build, reference, runner

CPU = torch.device("cpu")
PAGED = Case(
    "paged",
    (5, 0, 1, 40),
    (33, 7, 16, 40),
    *(8, 2, 64),
    page_size=16,
    form=KvForm.COMBINED,
    mask=MaskKind.CAUSAL,
)


def test_paged_sets_differ_and_share_their_page_table():
    first, second = itertools.islice(batches(PAGED, CPU, seed=3), 2)
    assert first.page_table == second.page_table
    assert not torch.equal(first.q, second.q)
    assert first.kv_indptr.tolist() == [0, 3, 4, 5, 8]
    assert first.last_page_len.tolist() == [1, 7, 16, 8]
    assert len(set(first.indices.tolist())) == 8


def test_owned_slots_are_finite_and_the_others_nan():
    inputs = next(batches(PAGED, CPU, seed=3))
    owned = 0
    for index, kv_len in enumerate(PAGED.kv_lens):
        request = inputs.request(index)
        assert request.k.shape == (kv_len, 2, 64)
        assert request.k.isfinite().all()
        assert request.v.isfinite().all()
        assert not torch.equal(request.k, request.v)
        owned += request.k.numel() + request.v.numel()
    assert int(inputs.cache.isfinite().sum()) == owned
    assert int(inputs.cache.isnan().sum()) == inputs.cache.numel() - owned


def test_a_custom_mask_is_refused():
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_agrees_with_the_oracle(dtype):
    for row in bench_rows.quick_rows():
        case = row.case.with_dtype(dtype)
        row = dataclasses.replace(row, case=case)
        inputs = next(batches(case, CPU))
        for prepare in baselines_of(row, CPU).values():
            out = prepare(inputs)()
            report = runner.compare(inputs, out, None)
            assert report.worst_ratio < 4, f"{row.name}: {report}"
