"""Prefill beside decode: one launch of both, and what it stands beside: each alone, at its best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

import preflash

from ...testing import Inputs, runner, timing
from ...testing.case import Case, KvForm, MaskKind
from ..batches import BatchMaker, Sample
from ..console import Table
from ..machine import Place

_WORKSPACE_BYTES = 256 * 1024 * 1024
_ROWS_PER_REQUEST = 2


@dataclasses.dataclass(frozen=True)
class PodRow:
    """Causal prefills beside decode requests, GQA 4, head_dim 128, pages on both sides."""

    prefill: Case
    decode: Case

    @property
    def name(self) -> str:
        prefill, decode = self.prefill, self.decode
        return (
            f"pod {len(prefill.kv_lens)}x{prefill.kv_lens[0]} + "
            f"{len(decode.kv_lens)}x{decode.kv_lens[0]} page {prefill.page_size}"
        )

    def with_dtype(self, dtype: torch.dtype) -> PodRow:
        return PodRow(self.prefill.with_dtype(dtype), self.decode.with_dtype(dtype))


def _row(prefills: int, tokens: int, decodes: int, keys: int, page_size: int, heads: int) -> PodRow:
    def case(name: str, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Case:
        mask = MaskKind.CAUSAL if name == "prefill" else MaskKind.NONE
        shape = (4 * heads, heads, 128)
        options = {"page_size": page_size, "form": KvForm.COMBINED, "mask": mask}
        return Case(f"pod {name}", qo_lens, kv_lens, *shape, **options)

    lengths = (tokens,) * prefills
    return PodRow(
        case("prefill", lengths, lengths), case("decode", (1,) * decodes, (keys,) * decodes)
    )


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


@dataclasses.dataclass
class PodResult:
    """Microseconds of each call; `absent` says why there are none."""

    row: PodRow
    variant: str = ""
    launches: int = 0
    us: dict[str, float] = dataclasses.field(default_factory=dict)
    plan_us: float | None = None
    run_cpu_us: float | None = None
    absent: str = ""
    failure: str = ""


BOTH, PREFILL, DECODE = "both", "prefill alone", "decode alone"


def measure_pod(row: PodRow, place: Place, repeats: int) -> PodResult:
    """Checks both sides against the oracle, then times them, and each alone by its own wrapper with
    backend="auto" on a GPU, which takes the fastest."""
    result = PodResult(row)
    prefill, decode = (BatchMaker(case, place.device).make() for case in (row.prefill, row.decode))
    try:
        both = checked_call(result, place, prefill, decode)
        alone = {name: _alone(one, place) for name, one in ((PREFILL, prefill), (DECODE, decode))}
    except NotImplementedError as error:
        result.absent = str(error)
        return result
    if result.failure:
        return result
    calls = {BOTH: both, **alone}
    both()
    if place.device.type == "cpu":
        for name, call in calls.items():
            result.us[name] = timing.cpu_wall_time(call, min_samples=repeats).median_us
        return result
    result.run_cpu_us = timing.cpu_call_time(both, calls=20, samples=repeats).median_us
    replays = {name: timing.GraphReplay(call, 10) for name, call in calls.items()}
    for name, taken in timing.interleaved(replays, repeats).items():
        result.us[name] = taken.median_us
    return result


def checked_call(
    result: PodResult, place: Place, prefill: Inputs, decode: Inputs
) -> Callable[[], object]:
    """A run of both sides, planned; its first result has been compared with the oracle's."""
    wrapper = _planned(result, place, prefill, decode)
    outputs = {
        f"out_{side}": torch.empty_like(one.q) for side, one in (("p", prefill), ("d", decode))
    }
    sides = (prefill.q, prefill.cache, decode.q, decode.cache)
    return lambda: wrapper.run(*sides, causal_p=True, **outputs)


def _planned(result: PodResult, place: Place, prefill: Inputs, decode: Inputs):
    """A wrapper whose first result has been compared with the oracle's."""
    case = prefill.case
    buffer = runner.workspace(place.device, _WORKSPACE_BYTES)
    wrapper = preflash.BatchPODWithPagedKVCacheWrapper(buffer, backend=place.backend)
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    tables = [
        (one.qo_indptr, one.kv_indptr, one.indices, one.last_page_len) for one in (prefill, decode)
    ]

    def plan() -> None:
        wrapper.plan(*tables[0], *tables[1], *heads, q_data_type=case.dtype)

    plan()
    sides = (prefill.q, prefill.cache, decode.q, decode.cache)
    results = wrapper.run(*sides, causal_p=True, return_lse=True)
    result.variant, result.launches = wrapper.variant, wrapper.launches
    for inputs, (out, lse) in zip((prefill, decode), results, strict=True):
        sample = Sample(inputs.case.qo_lens, _ROWS_PER_REQUEST)
        expected = sample.expected(inputs)
        report = runner.compare(inputs, sample.of(out), sample.of(lse), expected)
        if not report.ok:
            result.failure = f"{inputs.case.name}: {report}"
    planned = timing.cpu_call_time(plan, calls=3, samples=3, device=place.device.type)
    result.plan_us = planned.median_us
    return wrapper


def _alone(inputs: Inputs, place: Place):
    backend = place.backend if place.device.type == "cpu" else "auto"
    buffer = runner.workspace(place.device, _WORKSPACE_BYTES)
    wrapper = runner.make_wrapper(inputs.case, backend=backend, device=place.device, buffer=buffer)
    runner.plan(wrapper, inputs)
    out = torch.empty_like(inputs.q)
    return lambda: wrapper.run(inputs.q, inputs.cache, out=out)


def pod_table(results: list[PodResult]) -> Table:
    headers = ["row", "variant", "launches", "us", PREFILL, DECODE, "of sum", "of larger"]
    headers += ["plan us", "run CPU us"]
    table = Table(headers, frozenset(headers[2:]))
    for result in results:
        cells: list[str | None] = [None] * 5
        if result.us:
            both, prefill, decode = (result.us[name] for name in (BOTH, PREFILL, DECODE))
            cells = [f"{us:.1f}" for us in (both, prefill, decode)]
            cells += [f"{both / (prefill + decode):.2f}", f"{both / max(prefill, decode):.2f}"]
        table.add(
            result.row.name,
            "WRONG" if result.failure else result.variant or "not compiled",
            str(result.launches) if result.launches else None,
            *cells,
            None if result.plan_us is None else f"{result.plan_us:.0f}",
            None if result.run_cpu_us is None else f"{result.run_cpu_us:.1f}",
        )
    return table.without_empty_columns()
