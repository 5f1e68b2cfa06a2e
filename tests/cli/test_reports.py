"""`bench --compare` compares reports; other packages join a bench where they import."""

from __future__ import annotations

import json
import sys
import types

import preflash
import torch
from preflash.cli.bench import baselines, rows
from preflash.testing import build, runner


def test_compares(preflash_command, tmp_path):
    options = ("--quick", "--repeats", "1", "--backend", "cpu", "--rows", "dense,decode,mixed")
    done = preflash_command("bench", *options, "--json", "a.json")
    assert done.code == 0, done.err
    assert "wrote a.json\n" in done.out
    assert "not timed" not in done.out  # as torch's calls would be if the oracle differed
    report = json.loads((tmp_path / "a.json").read_text())
    for row in report["rows"]:
        row["us"] = {name: us / 2 for name, us in row["us"].items()}
        assert row["dtype"] == "bfloat16"
        row["dtype"] = "bf16"  # the same row: a report may have either name
    (tmp_path / "b.json").write_text(json.dumps(report))
    done = preflash_command("bench", "--compare", "a.json", "b.json")
    assert done.code == 0
    assert done.out.count("2.000x") == len(report["rows"]) + 1
    assert "wrote" not in done.out


def _fa3():
    """Returns FlashAttention-3's call, by a wrapper of preflash."""

    def flash_attn_varlen_func(q, k, v, qo, kv, most_q, most_kv, *, softmax_scale, causal):
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(), "NHD")
        heads = (q.shape[1], k.shape[1], q.shape[2])
        options = {"causal": causal, "sm_scale": softmax_scale, "q_data_type": q.dtype}
        wrapper.plan(qo, kv, *heads, **options)
        return wrapper.run(q, k, v)

    return types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def test_other_packages_join_where_they_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", preflash)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", _fa3())
    baselines._imported.cache_clear()
    for row in rows.quick_rows():
        row = row.with_dtype(torch.float32)
        calls = baselines.others_of(row)
        assert set(calls) == {"flashinfer"} | (set() if row.case.paged else {"flash_attn_3"})
        inputs = build(row.case)
        for prepare in calls.values():
            assert runner.compare(inputs, prepare(inputs)(), None).ok
    baselines._imported.cache_clear()
