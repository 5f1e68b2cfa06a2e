"""The benchmark counts operations and bytes, and its rows refer to and differ from each other."""

import itertools

import preflash
import torch
from preflash.cli.bench import fmha, measure, pod
from preflash.cli.bench import rows as bench_rows
from preflash.cli.bench.rows import Baseline
from preflash.cli.machine import choose_places
from preflash.testing import oracle
from preflash.testing.case import flops

GPU_ROWS = {row.name: row for row in bench_rows.gpu_rows()}


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


CPU = choose_places("cpu")[0]


def test_prefill_beside_decode_is_checked_and_timed():
    (row,) = pod.pod_rows_for("cpu", quick=True)
    result = measure.measured(pod.pod_calls, row.with_dtype(torch.bfloat16), CPU, 1)
    assert (result.failure, result.absent) == ("", {})
    assert (result.launches, set(result.us)) == (1, {pod.BOTH, pod.PREFILL, pod.DECODE})
    assert row.name in pod.pod_table([result])


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
