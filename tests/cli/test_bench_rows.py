"""The benchmark counts operations and bytes, and its rows refer to and differ from each other."""

import preflash
import pytest
import torch
from preflash.cli.bench import fmha, measure, pod
from preflash.cli.bench import rows as bench_rows
from preflash.cli.bench.rows import Baseline
from preflash.cli.machine import choose_places
from preflash.testing import oracle
from preflash.testing.case import flops

GPU_ROWS = {row.name: row for row in bench_rows.gpu_rows()}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_rows_are_named_once_and_refer_to_earlier_rows(device_type, quick):
    kinds = (bench_rows.rows_for, pod.pod_rows_for, fmha.fmha_rows_for)
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


def test_prefill_beside_decode_is_checked_and_timed():
    (row,) = pod.pod_rows_for("cpu", quick=True)
    place = choose_places("cpu")[0]
    result = measure.measured(pod.pod_calls, row.with_dtype(torch.bfloat16), place, 1)
    assert (result.failure, result.absent) == ("", {})
    assert (result.launches, set(result.us)) == (1, {pod.BOTH, pod.PREFILL, pod.DECODE})
    assert row.name in pod.pod_table([result])


def test_rows_beside_torchs_cudnn():
    """Requests of one length, and as many heads of q as of k: torch's call takes no others."""
    cases = [row.case for row in GPU_ROWS.values() if Baseline.SDPA in row.baselines]
    assert cases
    for case in cases:
        assert not case.paged
        assert len({*case.qo_lens, *case.kv_lens}) == 1
        assert case.num_qo_heads == case.num_kv_heads


def test_rows_of_prefill_beside_decode():
    for row in pod.pod_rows_for("cuda", quick=False):
        assert set(row.decode.qo_lens) == {1}
        assert row.case.num_qo_heads == row.decode.num_qo_heads


def test_pairs_of_the_modes_of_the_fmha_call():
    for mode in (fmha.CAUSAL, fmha.Mode(window_left=5), fmha.Mode(chunk=8)):
        assert mode.pairs(37) == int(oracle.kept(mode.pipeline, 37, 37).sum())


def test_modes_of_the_fmha_call_are_checked_and_timed(monkeypatch):
    (row,) = fmha.fmha_rows_for("cpu", quick=True)
    place = choose_places("cpu")[0]
    result = measure.measured(fmha.fmha_calls, row.with_dtype(torch.float16), place, 1)
    assert result.failure == ""
    assert not result.absent
    assert set(result.us) == {mode.name for mode in row.modes}
    assert 0 < result.distance["skip 10000"] < 1
    table = fmha.fmha_table([result])
    assert "chunks of 64" in table
    honest = preflash.trtllm_fmha_v2_prefill

    def without_window(*args, **options):
        return honest(*args, **{**options, "window_left": -1})

    monkeypatch.setattr(preflash, "trtllm_fmha_v2_prefill", without_window)
    wrong = measure.measured(fmha.fmha_calls, row, place, 1)
    assert "window 16: out:" in wrong.failure
    assert "WRONG" in fmha.fmha_table([wrong])


def test_flops_count_causal_as_half():
    for name, pairs in (("full", 4096**2), ("causal", 4096 * 4097 // 2)):
        assert flops(GPU_ROWS[f"dense d128 s4096 {name}"].case) == 4 * 128 * 16 * 4 * pairs


def test_bytes_count_every_tensor_once():
    row = GPU_ROWS["decode 64x4k page 16"]
    keys_and_values = 64 * 4096 * 8 * 128 * 2 * 2
    queries_and_outputs = 64 * 32 * 128 * 2 * 2
    assert row.bytes() == keys_and_values + queries_and_outputs
    assert row.baselines == (Baseline.READ,)
