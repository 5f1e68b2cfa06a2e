"""A timeline in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from .timeline import Timeline, lanes

_PROCESS = 1


def chrome_trace(timeline: Timeline) -> dict:
    """One thread for each processor, and further ones where it holds several CTAs. Times are in
    microseconds, as the format wants them."""
    events = [_name("process_name", 0, timeline.title)]
    thread = 0
    for processor in timeline.processors:
        of_processor = lanes(timeline.of_processor(processor)) or [[]]
        for number, lane in enumerate(of_processor):
            label = f"{timeline.processor_name} {processor:03}"
            name = label if len(of_processor) == 1 else f"{label} CTA {number}"
            events += [_name("thread_name", thread, name), _order(thread)]
            for span in lane:
                args = {
                    "kernel": timeline.launches[span.launch],
                    "launch": span.launch,
                    "cta": span.cta,
                    "request": span.request,
                    "kv_head": span.kv_head,
                    "chunk": span.chunk,
                }
                events.append(
                    {
                        "ph": "X",
                        "name": span.kind.value,
                        "cat": span.kind.value,
                        "pid": _PROCESS,
                        "tid": thread,
                        "ts": round(span.begin_us, 3),
                        "dur": round(span.end_us - span.begin_us, 3),
                        "args": args,
                    }
                )
            thread += 1
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"title": timeline.title, "summary": timeline.summary()},
    }


def _name(what: str, thread: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _order(thread: int) -> dict:
    args = {"sort_index": thread}
    return {"ph": "M", "name": "thread_sort_index", "pid": _PROCESS, "tid": thread, "args": args}
