"""Prefill beside decode: one launch of both, and what it stands beside: each alone, at its best."""

from __future__ import annotations

import dataclasses
import functools

import preflash

from ...testing import runner, timing
from ...testing.case import Case, KvForm, MaskKind
from ..console import Table
from ..machine import Place
from .baselines import WORKSPACE_BYTES, Call
from .measure import Calls, Result, Trial
from .rows import BenchRow


@dataclasses.dataclass(frozen=True)
class PodRow(BenchRow):
    """Causal prefills (`case`) beside decode requests, GQA 4, head_dim 128, pages on both sides."""

    decode: Case


def _row(prefills: int, tokens: int, decodes: int, keys: int, page_size: int, heads: int) -> PodRow:
    name = f"pod {prefills}x{tokens} + {decodes}x{keys} page {page_size}"
    shape = (4 * heads, heads, 128)
    options = {"page_size": page_size, "form": KvForm.COMBINED}
    lengths = (tokens,) * prefills
    prefill = Case(name, lengths, lengths, *shape, mask=MaskKind.CAUSAL, **options)
    return PodRow(prefill, Case("pod decode", (1,) * decodes, (keys,) * decodes, *shape, **options))


# Prefills and their tokens, decode requests and their keys.
_MIXES = (
    (2, 2048, 128, 2048),
    (1, 2048, 128, 2048),
    (1, 4096, 128, 4096),
    (1, 4096, 128, 8192),
    (1, 512, 64, 8192),
    (1, 8192, 32, 1024),
)


def pod_rows_for(device_type: str, quick: bool) -> list[PodRow]:
    if quick:
        return [_row(1, 129, 4, 257, 16, 1)]
    if device_type == "cpu":
        return [_row(1, 512, 16, 1024, 16, 2)]
    return [_row(*mix, page_size, 8) for mix in _MIXES for page_size in (16, 1)]


BOTH, PREFILL, DECODE = "both", "prefill alone", "decode alone"


def pod_calls(result: Result, place: Place, repeats: int) -> Calls:
    """Both sides in one call, and each alone by its own wrapper with backend="auto" on a GPU, which
    takes the fastest."""
    sides = [Trial(case, place) for case in (result.row.case, result.row.decode)]
    calls = {BOTH: [checked_call(result, sides)]}
    backend = place.backend if place.device.type == "cpu" else "auto"
    for name, trial in zip((PREFILL, DECODE), sides, strict=True):
        wrapper = runner.planned(trial.sets[0], backend=backend, size=WORKSPACE_BYTES)
        calls[name] = trial.launchers(wrapper)
    if place.device.type == "cuda":
        result.run_cpu_us = timing.cpu_call_time(calls[BOTH][0], calls=20, samples=repeats)
    return calls


def checked_call(result: Result, sides: list[Trial]) -> Call:
    """A run of both sides, planned; its first result is right."""
    place, inputs = sides[0].place, [trial.sets[0] for trial in sides]
    buffer = runner.workspace(place.device, WORKSPACE_BYTES)
    wrapper = preflash.BatchPODWithPagedKVCacheWrapper(buffer, backend=place.backend)
    prefill, decode = (runner.plan_arguments(one)[0] for one in inputs)
    # Four tables of each side, then the heads and the page size, which are the same.
    dtype = result.row.case.dtype
    plan = functools.partial(wrapper.plan, *prefill[:4], *decode, q_data_type=dtype)
    plan()
    tensors = [tensor for one in inputs for tensor in (one.q, one.cache)]
    run = functools.partial(wrapper.run, *tensors, causal_p=True)
    results = run(return_lse=True)
    result.variant, result.launches = wrapper.variant, wrapper.launches
    for trial, (out, lse) in zip(sides, results, strict=True):
        trial.check(out, lse)
    result.plan_us = timing.cpu_call_time(plan, calls=3, samples=3, device=place.device.type)
    (out_p, _), (out_d, _) = results
    return functools.partial(run, out_p=out_p, out_d=out_d)


def pod_table(results: list[Result]) -> str:
    times = {"us": ".1f", PREFILL: ".1f", DECODE: ".1f", "of sum": ".2f", "of larger": ".2f"}
    cpu_times = {"plan us": ".0f", "run CPU us": ".1f"}
    table = Table({"row": "", "variant": "", "launches": "d", **times, **cpu_times})
    for result in results:
        cells: list[float | None] = [None] * 5
        if result.us:
            both, *alone = (result.us[name] for name in (BOTH, PREFILL, DECODE))
            cells = [both, *alone, both / sum(alone), both / max(alone)]
        verdict = "WRONG" if result.failure else result.variant or "not compiled"
        about = (result.row.name, verdict, result.launches or None)
        table.add(*about, *cells, result.plan_us, result.run_cpu_us)
    note = "of sum, of larger: the time of both in that of the prefill and the decode alone."
    return f"{table}\n\n{note}"
