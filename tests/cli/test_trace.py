"""`bench --trace`: records of work items on the CPU, the trace file, the picture, and refusals."""

import importlib.util
import json

import preflash
import pytest
import torch
from preflash import _core
from preflash.cli import main
from preflash.cli.bench.trace import (
    Kind,
    Launch,
    Span,
    Timeline,
    chrome_trace,
    draw,
    lanes,
    read_spans,
)

_WORDS = 4
has_matplotlib = importlib.util.find_spec("matplotlib") is not None


def span(begin, end, processor=0, kind=Kind.PREFILL, **other):
    names = {"launch": 0, "cta": 0, "request": 0, "kv_head": 0, "chunk": 0, **other}
    return Span(begin, end, processor, kind=kind, **names)


def timeline(*spans, processors=(0, 1)):
    return Timeline("a row", "SM", processors, ("a_kernel", "another"), spans)


def traced_run(run):
    """The records of what `run` launches on the CPU."""
    records = torch.zeros(4096, _WORDS, dtype=torch.int64)
    trace = _core.Trace(records.data_ptr(), len(records), -1)
    trace.start()
    run()
    trace.stop()
    return records, trace.launches


def prefill(tokens, keys, heads=2):
    q, kv = torch.randn(tokens, 2 * heads, 64), torch.randn(keys, heads, 64)
    return preflash.single_prefill_with_kv_cache(q, kv, kv, causal=True)


def test_every_item_of_a_launch_has_a_record():
    records, launches = traced_run(lambda: prefill(300, 300))
    [(kernel, first, count)] = launches
    assert kernel.startswith("cpu_f32")
    assert first == 0
    assert count > 0
    spans = read_spans(records, [Launch(kernel, first, count, (300,))])
    assert len(spans) == count
    assert all(one.end_us >= one.begin_us >= 0.0 for one in spans)
    assert {one.kv_head for one in spans} == {0, 1}
    assert {one.kind for one in spans} == {Kind.PREFILL}
    assert not records[count:].any()  # nothing behind the launch's own records


def test_launches_lie_one_behind_the_other():
    def run():
        prefill(70, 70)
        prefill(1, 900)

    records, launches = traced_run(run)
    (_, first, count), (_, second, more) = launches
    assert (first, second) == (0, count)
    lens = [(70,), (1,)]
    spans = read_spans(
        records, [Launch(*launch, qo) for launch, qo in zip(launches, lens, strict=True)]
    )
    assert [one.launch for one in spans] == sorted(one.launch for one in spans)
    assert sum(one.kind is Kind.DECODE for one in spans) == more
    assert records[: count + more, 1].all()


def test_results_are_the_same_and_later_runs_record_nothing():
    torch.manual_seed(0)
    q, kv = torch.randn(33, 4, 64), torch.randn(65, 2, 64)
    expected = preflash.single_prefill_with_kv_cache(q, kv, kv)
    got = []
    records, launches = traced_run(
        lambda: got.append(preflash.single_prefill_with_kv_cache(q, kv, kv))
    )
    assert torch.equal(got[0], expected)
    before = records.clone()
    prefill(64, 64)
    assert torch.equal(records, before)
    assert len(launches) == 1


def test_records_that_do_not_fit_are_refused():
    records = torch.zeros(1, _WORDS, dtype=torch.int64)
    trace = _core.Trace(records.data_ptr(), 1, -1)
    trace.start()
    try:
        with pytest.raises(ValueError, match="room for 1 more records"):
            prefill(300, 300)
    finally:
        trace.stop()
    assert not records.any()


def test_a_trace_of_another_device_is_refused():
    records = torch.zeros(4096, _WORDS, dtype=torch.int64)
    trace = _core.Trace(records.data_ptr(), len(records), 0)
    trace.start()
    try:
        with pytest.raises(ValueError, match="records are on device 0, the launch on -1"):
            prefill(5, 5)
    finally:
        trace.stop()
    prefill(5, 5)


def test_a_trace_that_is_gone_records_nothing():
    records = torch.zeros(64, _WORDS, dtype=torch.int64)
    trace = _core.Trace(records.data_ptr(), len(records), -1)
    trace.start()
    del trace
    prefill(5, 5)
    assert not records.any()


def test_read_spans_of_every_field():
    record = torch.zeros(3, _WORDS, dtype=torch.int64)
    words, halves = record.view(torch.int32), record.view(torch.int16)
    record[0, 0], record[0, 1] = 5_000_000_001_000, 5_000_000_003_500
    words[0, 4], words[0, 5], words[0, 6] = 131, 17, 1
    halves[0, 14], halves[0, 15] = 7, 3
    record[2, 0], record[2, 1] = 5_000_000_000_000, 5_000_000_000_250  # [1] did not run
    spans = read_spans(record, [Launch("k", 0, 3, (8, 1))])
    assert spans == (
        span(0.0, 0.25),
        span(1.0, 3.5, 131, Kind.DECODE, cta=17, request=1, kv_head=7, chunk=3),
    )


def test_summary():
    line = timeline(
        span(0.0, 40.0), span(10.0, 20.0), span(60.0, 100.0, kind=Kind.DECODE), span(0.0, 50.0, 1)
    ).summary()
    # Of 200 us, 90 are prefill (10 of them twice), 40 decode.
    assert line.startswith("4 items in 100.0 us on 2 SMs: prefill 45.0 %, decode 20.0 %, idle 35.0")
    assert "the first SM is done at 50.0 us" in line
    assert timeline().summary() == "no work item ran"


def test_lanes_hold_what_does_not_overlap():
    spans = [span(0, 10), span(2, 5), span(5, 9), span(10, 12)]
    assert lanes(spans) == [[spans[0], spans[3]], [spans[1], spans[2]]]


def test_chrome_trace():
    line = timeline(
        span(0.0, 10.0, 1),
        span(4.0, 12.0, 1, Kind.DECODE, request=3, cta=9, launch=1),
        span(10.0, 11.5, 1),
    )
    document = json.loads(json.dumps(chrome_trace(line)))
    events = document["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert names == {0: "SM 000", 1: "SM 001 CTA 0", 2: "SM 001 CTA 1"}
    assert [(bar["tid"], bar["name"], bar["ts"], bar["dur"]) for bar in bars] == [
        (1, "prefill", 0.0, 10.0),
        (1, "prefill", 10.0, 1.5),
        (2, "decode", 4.0, 8.0),
    ]
    assert bars[2]["args"] == {
        "kernel": "another",
        "launch": 1,
        "cta": 9,
        "request": 3,
        "kv_head": 0,
        "chunk": 0,
    }
    assert document["otherData"]["title"] == "a row"


@pytest.mark.skipif(not has_matplotlib, reason="no matplotlib")
@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_picture(tmp_path, ending):
    path = tmp_path / f"gantt{ending}"
    draw(timeline(span(0.0, 10.0, 1), span(4.0, 12.0, 1, Kind.DECODE)), path)
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    content = path.read_bytes()
    assert content.startswith(magic)
    if ending == ".svg":
        for text in (b"#1f6fb4", b"#f5a623"):
            assert text in content


def bench(*arguments):
    return main(["bench", "--backend", "cpu", "--quick", *arguments])


def test_command_writes_a_trace(tmp_path, capsys):
    path = tmp_path / "pod.json"
    assert bench("--trace", str(path)) == 0
    said = capsys.readouterr().out
    assert f"wrote {path}" in said
    assert "pod 1x129 + 4x257 page 16, the first of" in said
    bars = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {bar["name"] for bar in bars} == {"prefill", "decode"}
    assert {bar["args"]["request"] for bar in bars if bar["name"] == "decode"} == {1, 2, 3, 4}
    assert all(bar["dur"] >= 0 for bar in bars)


def test_command_takes_the_row_that_is_named(tmp_path, capsys):
    path = tmp_path / "row.json"
    assert bench("--rows", "dense d64 s512 full", "--trace", str(path)) == 0
    assert "dense d64 s512 full" in capsys.readouterr().out
    bars = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {bar["name"] for bar in bars} == {"prefill"}


def test_a_picture_without_matplotlib_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("pod.png", "pod"):
        assert bench("--trace", str(tmp_path / name)) != 0
        said = capsys.readouterr()
        assert "pip install 'preflash[trace]'" in said.err + said.out
        assert f"write --trace {tmp_path / 'pod.json'}" in said.err + said.out
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused(tmp_path, capsys):
    assert bench("--trace", str(tmp_path / "pod.txt")) == 2
    assert ".txt is neither .json nor a picture" in capsys.readouterr().err


@pytest.mark.skipif(not has_matplotlib, reason="no matplotlib")
def test_a_name_without_an_ending_writes_both(tmp_path):
    assert bench("--trace", str(tmp_path / "pod")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pod.json", "pod.png"]
