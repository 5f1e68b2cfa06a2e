"""The rows of `bench`: their names, inputs, counts of operations and bytes, baselines, timing."""

import dataclasses
import itertools
import statistics
import sys
import types

import preflash
import pytest
import torch
from preflash.cli.batches import Sample, batches
from preflash.cli.bench import baselines, fmha, measure, pod
from preflash.cli.bench import rows as bench_rows
from preflash.cli.bench.rows import Baseline
from preflash.cli.machine import choose_places
from preflash.testing import Case, KvForm, MaskKind, build, oracle, reference, runner, timing
from preflash.testing.case import flops

GPU_ROWS = {row.name: row for row in bench_rows.gpu_rows()}
CPU = choose_places("cpu")[0]
PAGED = Case("paged", (5, 0, 1, 40), (33, 7, 16, 40), 8, 2, 64, page_size=16,
             form=KvForm.COMBINED, mask=MaskKind.CAUSAL)  # fmt: skip


def test_rows_are_named_once_and_refer_to_earlier_rows():
    kinds = (bench_rows.rows_for, pod.pod_rows_for, fmha.fmha_rows_for)
    for device_type, quick in itertools.product(("cpu", "cuda"), (False, True)):
        names = [row.name for rows_for in kinds for row in rows_for(device_type, quick)]
        assert len(set(names)) == len(names)
        seen = set()
        for row in bench_rows.rows_for(device_type, quick):
            seen.add(row.name)
            if row.relative_to is not None:
                assert row.relative_to.name in seen
                splits = row.case.is_invariant
                assert splits == row.name.startswith("invariant ")
                assert (row.relative_to.page_size > 0, row.case.page_size > 0) == (splits, True)
                assert row.relative_to.kv_lens == row.case.kv_lens


def test_rows_are_what_their_calls_take():
    """torch's cuDNN: requests of one length, and as many heads of q as of k."""
    cases = [row.case for row in GPU_ROWS.values() if Baseline.SDPA in row.baselines]
    assert cases
    for case in cases:
        assert not case.paged
        assert len({*case.qo_lens, *case.kv_lens}) == 1
        assert case.num_qo_heads == case.num_kv_heads
    for row in pod.pod_rows_for("cuda", quick=False):
        assert set(row.decode.qo_lens) == {1}
        assert row.case.num_qo_heads == row.decode.num_qo_heads


def test_operations_are_of_kept_pairs_and_bytes_of_every_tensor_once():
    for name, pairs in (("full", 4096**2), ("causal", 4096 * 4097 // 2)):
        assert flops(GPU_ROWS[f"dense d128 s4096 {name}"].case) == 4 * 128 * 16 * 4 * pairs
    for mode in (fmha.CAUSAL, fmha.Mode(window_left=5), fmha.Mode(chunk=8)):
        assert mode.pairs(37) == int(oracle.kept(mode.pipeline, 37, 37).sum())
    row = GPU_ROWS["decode 64x4k page 16"]
    keys_and_values = 64 * 4096 * 8 * 128 * 2 * 2
    queries_and_outputs = 64 * 32 * 128 * 2 * 2
    assert row.bytes() == keys_and_values + queries_and_outputs
    assert row.baselines == (Baseline.READ,)


def test_paged_sets_differ_and_share_their_page_table():
    """Owned slots are finite, and the others NaN."""
    first, second = itertools.islice(batches(PAGED, CPU.device, seed=3), 2)
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
        next(batches(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), CPU.device))


def test_a_sample_is_those_rows_of_the_whole_answer():
    inputs = build(PAGED)
    sample = Sample(PAGED.qo_lens, 3, seed=1)
    whole, some = reference(inputs), sample.expected(inputs)
    assert len(sample) == some.out.shape[0]
    assert torch.equal(sample.of(whole.lse), some.lse)
    torch.testing.assert_close(sample.of(whole.out), some.out, rtol=0, atol=1e-13)
    # First and last rows of a request are among them; short requests are there whole.
    assert [rows.tolist()[:1] for rows in sample.rows] == [[0], [], [0], [0]]
    assert (sample.rows[0][-1], sample.rows[3][-1]) == (4, 39)


def test_prefill_beside_decode_is_checked_and_timed():
    (row,) = pod.pod_rows_for("cpu", quick=True)
    result = measure.measured(pod.pod_calls, row.with_dtype(torch.bfloat16), CPU, 1)
    assert (result.failure, result.absent) == ("", {})
    assert (result.launches, set(result.us)) == (1, {pod.BOTH, pod.PREFILL, pod.DECODE})
    assert row.name in pod.pod_table([result])


def test_modes_of_the_fmha_call_are_checked_and_timed(monkeypatch):
    (row,) = fmha.fmha_rows_for("cpu", quick=True)
    result = measure.measured(fmha.fmha_calls, row.with_dtype(torch.float16), CPU, 1)
    assert (result.failure, result.absent) == ("", {})
    assert set(result.us) == {mode.name for mode in row.modes}
    assert 0 < result.distance["skip 10000"] < 1
    assert "chunks of 64" in fmha.fmha_table([result])
    honest = preflash.trtllm_fmha_v2_prefill

    def without_window(*args, **options):
        return honest(*args, **{**options, "window_left": -1})

    monkeypatch.setattr(preflash, "trtllm_fmha_v2_prefill", without_window)
    wrong = measure.measured(fmha.fmha_calls, row, CPU, 1)
    assert "window 16: out:" in wrong.failure
    assert "WRONG" in fmha.fmha_table([wrong])


def flash_attn_varlen_func(q, k, v, qo, kv, most_q, most_kv, *, softmax_scale, causal):
    """Computes FlashAttention-3's call by a wrapper of preflash."""
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(), "NHD")
    heads = (q.shape[1], k.shape[1], q.shape[2])
    wrapper.plan(qo, kv, *heads, causal=causal, sm_scale=softmax_scale, q_data_type=q.dtype)
    return wrapper.run(q, k, v)


def test_other_packages_join_where_they_import(monkeypatch):
    fa3 = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flashinfer", preflash)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)
    baselines._imported.cache_clear()
    for row in bench_rows.quick_rows():
        row = row.with_dtype(torch.float32)
        calls = baselines.others_of(row)
        assert set(calls) == {"flashinfer"} | (set() if row.case.paged else {"flash_attn_3"})
        inputs = build(row.case)
        for prepare in calls.values():
            assert runner.compare(inputs, prepare(inputs)(), None).ok
    baselines._imported.cache_clear()


class Replay:
    """Each sample takes one microsecond more than the one before, whoever takes it."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def sample(self):
        self.order.append(self.name)
        return float(len(self.order))


@pytest.mark.parametrize("names", [("ours", "theirs", "another"), ()], ids=["three", "none"])
def test_interleaved_samples_each_after_each(names):
    order = []
    times = timing.interleaved({name: Replay(name, order) for name in names}, samples=21)
    taken = {name: [i for i, who in enumerate(order, 1) if who == name] for name in names}
    assert times == {name: statistics.median(samples) for name, samples in taken.items()}
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 21 * bool(names)
    assert all(sorted(one) == sorted(names) for one in rounds)
    assert {(a, b) for a in names for b in names if a != b} <= set(itertools.pairwise(order))
