"""`bench --trace` records the work items of launches, and writes a file or a picture of them."""

import json
import sys

import preflash
import pytest
import torch
from preflash import _core
from preflash.cli.bench.trace import Kind, Launch, Span, Timeline, chrome_trace, read_spans

_WORDS = 4


def span(begin, end, processor=0, kind=Kind.PREFILL, **other):
    names = {"launch": 0, "cta": 0, "request": 0, "kv_head": 0, "chunk": 0, **other}
    return Span(begin, end, processor, kind=kind, **names)


def timeline(*spans, processors=(0, 1)):
    return Timeline("a row", "SM", processors, ("a_kernel", "another"), spans)


def started(room, device=-1):
    records = torch.zeros(room, _WORDS, dtype=torch.int64)
    trace = _core.Trace(records.data_ptr(), room, device)
    trace.start()
    return records, trace


def prefill(tokens, keys, heads=2):
    q, kv = torch.randn(tokens, 2 * heads, 64), torch.randn(keys, heads, 64)
    return preflash.single_prefill_with_kv_cache(q, kv, kv, causal=True)


def test_every_item_of_a_launch_has_a_record():
    """Records of launches follow each other in their order; later runs record nothing."""
    q, kv = torch.randn(300, 4, 64), torch.randn(300, 2, 64)
    expected = preflash.single_prefill_with_kv_cache(q, kv, kv)
    records, trace = started(4096)
    assert torch.equal(preflash.single_prefill_with_kv_cache(q, kv, kv), expected)
    prefill(1, 900)
    trace.stop()
    (kernel, first, count), (_, second, more) = launches = trace.launches
    assert kernel.startswith("cpu_f32")
    assert (first, second) == (0, count)
    prefill(64, 64)
    assert not records[count + more :].any()
    requests = ((300,), (1,))
    spans = read_spans(
        records, [Launch(*one, lens) for one, lens in zip(launches, requests, strict=True)]
    )
    assert [one.launch for one in spans] == [0] * count + [1] * more
    assert [one.kind for one in spans] == [Kind.PREFILL] * count + [Kind.DECODE] * more
    assert all(one.end_us >= one.begin_us >= 0.0 for one in spans)
    assert {one.kv_head for one in spans} == {0, 1}


def test_records_that_cannot_be_taken_are_refused():
    _, trace = started(4096)
    prefill(300, 300)
    ((_, _, count),) = trace.launches
    del trace  # which ends it
    for room, device, before, message in (
        (1, -1, 0, "room for 1 more records"),
        (2 * count - 1, -1, 1, f"room for {count - 1} more records"),  # launches share the room
        (4096, 0, 0, "records are on device 0, the launch on -1"),
    ):
        records, trace = started(room, device)
        for _ in range(before):
            prefill(300, 300)
        taken = records.clone()
        with pytest.raises(ValueError, match=message):
            prefill(300, 300)
        del trace
        prefill(5, 5)
        assert torch.equal(records, taken)


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
    spans = span(0.0, 40.0), span(10.0, 20.0), span(60.0, 100.0, kind=Kind.DECODE)
    line = timeline(*spans, span(0.0, 50.0, 1)).summary()
    # 90 of 200 us are prefill (10 of these twice), 40 are decode.
    assert line.startswith("4 items in 100.0 us on 2 SMs: prefill 45.0 %, decode 20.0 %, idle 35.0")
    assert "the first SM is done at 50.0 us" in line
    assert timeline().summary() == "no work item ran"


def test_chrome_trace():
    line = timeline(
        span(0.0, 10.0, 1),
        span(4.0, 12.0, 1, Kind.DECODE, request=3, cta=9, launch=1),
        span(10.0, 11.5, 1),
    )
    document = json.loads(json.dumps(chrome_trace(line)))
    bars = bars_of(document)
    named = (event for event in document["traceEvents"] if event["name"] == "thread_name")
    names = {event["tid"]: event["args"]["name"] for event in named}
    assert names == {0: "SM 000", 1: "SM 001 CTA 0", 2: "SM 001 CTA 1"}
    assert [(bar["tid"], bar["name"], bar["ts"], bar["dur"]) for bar in bars] == [
        (1, "prefill", 0.0, 10.0),
        (1, "prefill", 10.0, 1.5),
        (2, "decode", 4.0, 8.0),
    ]
    args = {"launch": 1, "cta": 9, "request": 3, "kv_head": 0, "chunk": 0}
    assert bars[2]["args"] == {"kernel": "another", **args}
    assert document["otherData"]["title"] == "a row"


def bars_of(document: dict) -> list[dict]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize(
    ("line", "files", "title", "kinds", "requests"),
    [
        ("--trace pod", ["pod.json", "pod.png"], "pod 1x129 + 4x257 page 16, the first of",
         {"prefill", "decode"}, {1, 2, 3, 4}),
        ("--trace pod.json --rows d64", ["pod.json"], "dense d64 s512 full", {"prefill"}, set()),
        ("--trace pod.svg", ["pod.svg"], "pod 1x129", set(), set()),
    ],
)  # fmt: skip
def test_the_command_writes_what_the_name_says(
    preflash_command, tmp_path, line, files, title, kinds, requests
):
    pytest.importorskip("matplotlib")
    done = preflash_command(f"bench --backend cpu --quick {line}")
    assert done.code == 0
    assert title in done.out
    assert all(f"wrote {name}\n" in done.out for name in files)
    written = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    assert list(written) == files
    if "pod.svg" in written:  # the colours of prefill and of decode
        assert all(colour in written["pod.svg"] for colour in (b"#1f6fb4", b"#f5a623"))
        return
    assert written.get("pod.png", b"\x89PNG").startswith(b"\x89PNG")
    bars = bars_of(json.loads(written["pod.json"]))
    assert {bar["name"] for bar in bars} == kinds
    assert {bar["args"]["request"] for bar in bars if bar["name"] == "decode"} == requests
    assert all(bar["dur"] >= 0 for bar in bars)


@pytest.mark.parametrize("name", ["pod", "pod.png", "pod.svg", "pod.pdf"])
def test_a_picture_without_matplotlib_is_refused(preflash_command, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = preflash_command(f"bench --backend cpu --quick --trace {name}")
    assert done.code == 2
    for part in ("pip install 'preflash[trace]'", "write --trace pod.json"):
        assert part in done.err
    assert not list(tmp_path.iterdir())
