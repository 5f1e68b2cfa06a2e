"""`check`: a short self-test of every backend that this machine has, against the float64 oracle."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch

import preflash

from ..testing import Case, KvForm, MaskKind, Report, build, oracle, runner
from ..testing.comparison import elements
from ..testing.inputs import indptr, pack_little
from .console import Table, progress
from .machine import Place, choose_places

_CAUSAL = MaskKind.CAUSAL


def _attention_cases() -> Iterator[tuple[str, Case]]:
    """(area, problem): small, with odd lengths, empty requests and poisoned surroundings."""
    mixed = {"qo_lens": (33, 11, 1, 0, 70), "kv_lens": (261, 180, 231, 60, 70)}
    long = {"qo_lens": (1, 40), "kv_lens": (700, 600), "page_size": 16}
    gqa = {"num_qo_heads": 8, "num_kv_heads": 2}
    yield "prefill", Case("prefill", (64, 129, 1), (64, 129, 1), 4, 4, 64)
    yield "prefill", Case("causal", (64, 129, 1), (64, 129, 1), 8, 2, 128, mask=_CAUSAL)
    yield "prefill", Case("d256", (70, 17), (130, 17), 2, 1, 256, mask=_CAUSAL)
    yield "prefill", Case("d512", (40, 17), (100, 17), 4, 2, 512, mask=_CAUSAL)
    yield "prefill", Case("d192x128", (37, 100), (37, 211), 2, 2, 192, 128, mask=_CAUSAL)
    yield "prefill", Case("d96", (70, 20), (96, 200), 2, 2, 96, form=KvForm.PADDED, mask=_CAUSAL)
    yield "prefill", Case("more rows than keys", (150, 9), (64, 0), 4, 1, 128, mask=_CAUSAL)
    yield "paged", Case("page 16", **mixed, **gqa, page_size=16, mask=_CAUSAL)
    yield "paged", Case("page 1", **mixed, head_dim=64, page_size=1, mask=_CAUSAL)
    yield "paged", Case("page 5, HND", **mixed, page_size=5, layout="HND")
    yield "decode", Case("decode", (1,) * 4, (1, 16, 257, 400), 8, 1, page_size=16, mask=_CAUSAL)
    yield "decode", Case("few", (4, 3, 2), (64, 333, 18), 5, 1, page_size=8, mask=_CAUSAL)
    yield "mask", Case("custom", **mixed, mask=MaskKind.CUSTOM)
    yield "mask", Case("packed", **mixed, page_size=16, mask=MaskKind.PACKED)
    yield "mask", Case("window", **mixed, mask=_CAUSAL, window_left=31)
    yield "mask", Case("window, full", **mixed, head_dim=64, window_left=17)
    yield "softcap", Case("soft cap", **mixed, head_dim=64, mask=_CAUSAL, soft_cap=30.0)
    yield "split", Case("split", **long, mask=_CAUSAL, fixed_split_size=64)
    yield "split", Case("no split", **long, disable_split_kv=True)


@dataclasses.dataclass
class Outcome:
    """Result of one area of checks on one place."""

    passed: int = 0
    not_compiled: int = 0
    worst: float = 0.0  # largest error as a part of what is allowed
    seconds: float = 0.0
    variants: set[str] = dataclasses.field(default_factory=set)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failures:
            return "FAILED"
        return "ok" if self.passed else "not compiled"


def execute(args: argparse.Namespace) -> int:
    places = choose_places(args.backend)
    plan = [(place, area, test) for place in places for area, test in _tests(place, args.quick)]
    outcomes: dict[tuple[str, str], Outcome] = {}
    with progress(len(plan), "check") as step:
        for place, area, test in plan:
            _perform(test, outcomes.setdefault((place.label, area), Outcome()), area)
            step(f"{place.label} {area}")
    return _report(outcomes)


Test = Callable[[Outcome], None]


def _tests(place: Place, quick: bool) -> Iterator[tuple[str, Test]]:
    dtypes = place.dtypes[:1] if quick else place.dtypes
    for dtype in dtypes:
        for area, case in _attention_cases():
            yield area, functools.partial(_attention, place, case.with_dtype(dtype))
        yield "merge", functools.partial(_merge, place, dtype)
    yield "single", functools.partial(_single, place, dtypes[0])
    yield "packbits", functools.partial(_packbits, place)


def _perform(test: Test, outcome: Outcome, area: str) -> None:
    start = time.perf_counter()
    try:
        test(outcome)
        outcome.passed += 1
    except NotImplementedError:
        # A preset smaller than `full` leaves variants out; the miss is the documented answer.
        outcome.not_compiled += 1
    except Exception as error:  # whatever a broken backend raises belongs in the table
        outcome.failures.append(f"{area}: {type(error).__name__}: {error}")
    outcome.seconds += time.perf_counter() - start


def _attention(place: Place, case: Case, outcome: Outcome) -> None:
    inputs = build(case, device=place.device, index_device="cpu")
    wrapper = runner.planned(inputs, backend=place.backend)
    outcome.variants.add(wrapper.variant)
    _settle(runner.compare(inputs, *runner.run(wrapper, inputs)), case.id, outcome)


def _single(place: Place, dtype: torch.dtype, outcome: Outcome) -> None:
    case = Case("single", (65,), (200,), 8, 2, 128, dtype=dtype, mask=_CAUSAL)
    inputs = build(case, device=place.device)
    result = runner.single(inputs, backend=place.backend)
    _settle(runner.compare(inputs, *result), case.id, outcome)


def _settle(report: Report, name: str, outcome: Outcome) -> None:
    outcome.worst = max(outcome.worst, report.worst)
    if not report.ok:
        raise AssertionError(f"{name}: {report}")


def _merge(place: Place, dtype: torch.dtype, outcome: Outcome) -> None:
    random = torch.Generator().manual_seed(0)
    host = {"generator": random, "dtype": torch.float32, "device": "cpu"}
    v = torch.randn(19, 3, 4, 128, **host).to(place.device, dtype)
    s = torch.randn(19, 3, 4, **host).mul(8).to(place.device)
    s[0] = -math.inf
    s[1, 1] = -math.inf
    # The output's rounding, and a few float32 ones in the weights and in their sum.
    tolerance = torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    both = (preflash.merge_states(v, s), oracle.merge(v, s))
    two = preflash.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    merged = {"merge_states": both, "merge_state": (two, oracle.merge(v[:, :2], s[:, :2]))}
    report = Report()
    for name, pairs in merged.items():
        for part, got, expected, u in zip("vs", *pairs, (tolerance, 1e-5), strict=True):
            bound = u * (1 + expected.abs())
            _, worst = elements(report, f"{name} {part}", got, expected, bound)
            report.worst_ratio = max(report.worst_ratio, worst)
    _settle(report, "merge", outcome)


def _packbits(place: Place, outcome: Outcome) -> None:
    lengths = [0, 1, 7, 8, 9, 0, 131]
    random = torch.Generator().manual_seed(0)
    bits = torch.rand(sum(lengths), generator=random, device="cpu") < 0.5
    there, begins = bits.to(place.device), indptr(lengths).to(place.device)
    for bitorder in ("little", "big"):
        segments = [_bytes_of(part, bitorder) for part in bits.split(lengths)]
        sizes = indptr([len(segment) for segment in segments])
        packed, ends = preflash.segment_packbits(there, begins, bitorder)
        whole = preflash.packbits(there, bitorder)
        got = [packed.tolist(), ends.tolist(), whole.tolist()]
        expected = [[*itertools.chain(*segments)], sizes.tolist(), _bytes_of(bits, bitorder)]
        if got != expected:
            raise AssertionError(f"packbits {bitorder}: {got} instead of {expected}")


def _bytes_of(bits: torch.Tensor, bitorder: str) -> list[int]:
    octets = torch.nn.functional.pad(bits.byte(), (0, -len(bits) % 8)).view(-1, 8)
    return pack_little(octets if bitorder == "little" else octets.flip(1)).tolist()


def _report(outcomes: dict[tuple[str, str], Outcome]) -> int:
    counted = {"passed": "d", "not compiled": "d", "error / allowed": ".2f", "seconds": ".2f"}
    table = Table({"where": "", "what": "", "result": "", **counted})
    variants: set[str] = set()
    failures: list[str] = []
    for place, outcome in outcomes.items():
        counts = (outcome.passed, outcome.not_compiled or None, outcome.worst or None)
        table.add(*place, outcome.verdict, *counts, outcome.seconds)
        variants |= outcome.variants
        failures += outcome.failures
    print(table)
    print("\n  ".join([f"\n{len(variants)} variants ran:", *sorted(variants)]))
    for failure in failures:
        print(f"FAILED {failure}")
    print("\nFAILED" if failures else "\nall good")
    return 1 if failures else 0
