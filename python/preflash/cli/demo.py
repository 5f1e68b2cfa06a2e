"""`demo`: batch prefill over a paged KV cache, planned once and run for many layers, and verified.

Two parts: the example of FlashInfer's documentation with its custom-mask half, and a batch as a
serving engine forms it. Sampled rows of every layer are compared with a float64 oracle.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import torch

import preflash as flashinfer

from ..testing import Case, Inputs, KvForm, MaskKind, runner
from ..testing.case import flops
from . import CommandError, text
from .batches import BatchMaker, Sample
from .console import Progress, Table
from .machine import Place, choose_places

_WORKSPACE_BYTES = 128 * 1024 * 1024
_ROWS_PER_REQUEST = 4
_PLAN_REPEATS = 5
_LAYERS = 32
# Inputs and outputs of one full-size serving layer, with room to make them.
_SERVING_LAYER_BYTES = 400 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of the demo a machine does; said in its output."""

    example_layers: int
    serving_layers: int
    serving_divisor: int  # lengths of the serving batch are divided by it

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Scale:
        if quick:
            return cls(2, 2, 32)
        if device.type == "cpu":
            return cls(_LAYERS, 8, 4)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(_LAYERS, min(_LAYERS, max(2, free // _SERVING_LAYER_BYTES)), 1)

    @property
    def full(self) -> bool:
        return self == Scale(_LAYERS, _LAYERS, 1)

    def __str__(self) -> str:
        lengths = f"1/{self.serving_divisor} of the" if self.serving_divisor > 1 else "the"
        return (
            f"{self.example_layers} of {_LAYERS} example layers, {self.serving_layers} of "
            f"{_LAYERS} serving layers with {lengths} full lengths"
        )


# (new tokens, keys) of 16 requests: fresh prompts, chunks appended to long contexts, decoding ones.
_SERVING = (
    *((n, n) for n in (4096, 2048, 1500, 1024, 777, 64, 33)),
    *((512, 8192), (512, 4096), (256, 2048), (128, 1024), (16, 2000), (4, 1000)),
    *((1, n) for n in (4096, 1777, 1)),
)


@dataclasses.dataclass
class Part:
    """What one planned batch did: a line of the first table."""

    name: str
    case: Case
    variant: str
    plan_seconds: float
    run_seconds: list[float]

    @property
    def median_run(self) -> float:
        return statistics.median(self.run_seconds)


@dataclasses.dataclass
class Verdict:
    """One thing that was verified: a line of the second table."""

    what: str
    amount: str
    worst: str
    failures: list[str]


@dataclasses.dataclass
class Demo:
    """What the parts of the demo share and fill."""

    place: Place
    backend: str  # what the wrappers are asked for
    scale: Scale
    progress: Progress
    parts: list[Part] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def wrapper(self) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        buffer = runner.workspace(self.place.device, _WORKSPACE_BYTES)
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=self.backend)

    def timed(self, call: Callable[[], object]) -> tuple[object, float]:
        """The call's result and its wall time, the device's work included."""
        self._settle()
        start = time.perf_counter()
        result = call()
        self._settle()
        return result, time.perf_counter() - start

    def timed_plan(self, plan: Callable[[], object]) -> float:
        """Median wall time; planning again replaces a plan by its equal."""
        return statistics.median(self.timed(plan)[1] for _ in range(_PLAN_REPEATS))

    def _settle(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", help="cpu, fa2 or fa3; by default auto, which picks one for each batch"
    )
    parser.add_argument("--quick", action="store_true", help="two layers, short requests")
    parser.add_argument(
        "--text", metavar="FILE", help="embed and search the lines of a text instead, real weights"
    )
    parser.add_argument("--find", metavar="WORDS", help="what to search for; the first line")


def execute(args: argparse.Namespace) -> int:
    if args.text is not None:
        return text.execute(args)
    if args.find is not None:
        raise CommandError("--find needs --text FILE")
    place = choose_places(args.backend)[0]
    scale = Scale.of(place.device, args.quick)
    backend = args.backend or "auto"
    name = f"backend {backend} on {place.device} ({place.device_name})"
    print(f"preflash {flashinfer.__version__}, {name}")
    start = time.monotonic()
    # Per layer of a part: make inputs, run, compare; the example runs every layer twice.
    steps = 4 * scale.example_layers + 3 * scale.serving_layers
    with Progress(steps, "demo") as progress:
        demo = Demo(place, backend, scale, progress)
        _example(demo)
        _serving(demo)
    return _report(demo, time.monotonic() - start)


def _example(demo: Demo) -> None:
    """The example of the documentation: 7 requests, 64/16 heads, head_dim 128, page 16, float16."""
    num_layers = demo.scale.example_layers
    num_qo_heads, num_kv_heads, head_dim, max_num_pages, page_size = 64, 16, 128, 128, 16
    device = demo.place.device
    host = {"dtype": torch.int32, "device": "cpu"}
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, 100], **host)
    paged_kv_indices = torch.arange(max_num_pages, dtype=torch.int32, device=device)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], **host)
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], **host)
    table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
    heads = (num_qo_heads, num_kv_heads, head_dim, page_size)

    qo_lens = qo_indptr.diff().tolist()
    kv_lens = (page_size * (paged_kv_indptr.diff() - 1) + paged_kv_last_page_len).tolist()
    lengths = (tuple(qo_lens), tuple(kv_lens))
    stored = {"dtype": torch.float16, "page_size": page_size, "form": KvForm.COMBINED}
    case = Case("documented example", *lengths, *heads[:3], mask=MaskKind.CAUSAL, **stored)
    ends = paged_kv_indptr.tolist()
    pages = [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
    layers = []
    for _ in range(num_layers):
        q = torch.randn(100, num_qo_heads, head_dim, dtype=torch.float16, device=device)
        shape = (max_num_pages, 2, page_size, num_kv_heads, head_dim)
        cache = torch.randn(shape, dtype=torch.float16, device=device)
        layers.append(Inputs(case, q, qo_indptr, paged_kv_indptr, cache[:, 0], cache[:, 1], cache))
        layers[-1].page_table = pages
        demo.progress.step("example: inputs")

    wrapper = demo.wrapper()
    plan_seconds = demo.timed_plan(lambda: wrapper.plan(*table, *heads, causal=True))
    outputs = _run_layers(demo, wrapper, layers, case.name, plan_seconds)
    _compare_rows(demo, "example, causal", layers, outputs)

    mask = torch.cat(
        [
            torch.tril(torch.full((n, s), True, device=device), diagonal=s - n).flatten()
            for n, s in zip(qo_lens, kv_lens, strict=True)
        ]
    )
    try:
        plan_seconds = demo.timed_plan(lambda: wrapper.plan(*table, *heads, custom_mask=mask))
    except NotImplementedError as error:  # a build without that kernel
        demo.left_out.append(f"example, custom mask: {error}")
        for _ in range(num_layers):
            demo.progress.step("example: left out")
        return
    masked = _run_layers(demo, wrapper, layers, "the same, custom mask", plan_seconds)
    _compare_outputs(demo, "example, custom mask = causal", masked, outputs)


def _serving(demo: Demo) -> None:
    """16 requests of mixed lengths, GQA 32/8, head_dim 128, page 16, bfloat16, shuffled pages."""
    divisor = demo.scale.serving_divisor
    lengths = [tuple(-(-n // divisor) for n in side) for side in zip(*_SERVING, strict=True)]
    stored = {"page_size": 16, "form": KvForm.COMBINED}
    case = Case("serving batch", *lengths, 32, 8, 128, mask=MaskKind.CAUSAL, **stored)
    maker = BatchMaker(case, demo.place.device)
    layers = []
    for _ in range(demo.scale.serving_layers):
        layers.append(maker.make())
        demo.progress.step("serving: inputs")
    wrapper = demo.wrapper()
    plan_seconds = demo.timed_plan(lambda: runner.plan(wrapper, layers[0]))
    outputs = _run_layers(demo, wrapper, layers, case.name, plan_seconds)
    _compare_rows(demo, "serving", layers, outputs)
    _compare_finite(demo, outputs)
    _compare_repeat(demo, wrapper, layers[0], outputs[0])


Result = tuple[torch.Tensor, torch.Tensor]


def _run_layers(
    demo: Demo, wrapper, layers: list[Inputs], name: str, plan_seconds: float
) -> list[Result]:
    """(output, LSE) of every layer; adds a line to the table of what ran."""
    outputs, seconds = [], []
    for index, layer in enumerate(layers):
        result, taken = demo.timed(
            lambda layer=layer: wrapper.run(layer.q, layer.cache, return_lse=True)
        )
        outputs.append(result)
        seconds.append(taken)
        demo.progress.step(f"{name}: layer {index}")
    demo.parts.append(Part(name, layers[0].case, wrapper.variant, plan_seconds, seconds))
    return outputs


def _compare_rows(demo: Demo, name: str, layers: list[Inputs], outputs: list[Result]) -> None:
    """Sampled rows of every layer, all heads, output and LSE, against the float64 oracle."""
    rows, worst, failures = 0, 0.0, []
    for index, (layer, (out, lse)) in enumerate(zip(layers, outputs, strict=True)):
        sample = Sample(layer.case.qo_lens, _ROWS_PER_REQUEST, seed=index)
        expected = sample.expected(layer)
        report = runner.compare(layer, sample.of(out), sample.of(lse), expected)
        rows += len(sample) * layer.case.num_qo_heads
        worst = max(worst, report.worst)
        if not report.ok:
            failures.append(f"layer {index}: {report}")
        demo.progress.step(f"{name}: oracle, layer {index}")
    amount = f"{rows} sampled rows of {len(layers)} layers"
    what = f"{name}: output and LSE against float64"
    demo.verdicts.append(Verdict(what, amount, f"{worst:.2f} of the bound", failures))


def _millions(outputs: list[Result]) -> str:
    return f"{sum(out.numel() for out, _ in outputs) / 1e6:.1f}M values"


def _compare_outputs(demo: Demo, name: str, got: list[Result], expected: list[Result]) -> None:
    """Every value, with the tolerance of the documented example."""
    worst, failures = 0.0, []
    for index, ((out, _), (other, _)) in enumerate(zip(got, expected, strict=True)):
        worst = max(worst, float((out.float() - other.float()).abs().max()))
        if not torch.allclose(out, other, rtol=1e-3, atol=1e-3):
            failures.append(f"layer {index}: outputs differ by {worst:.3g}")
    demo.verdicts.append(Verdict(name, _millions(got), f"{worst:.1e} apart", failures))


def _compare_finite(demo: Demo, outputs: list[Result]) -> None:
    """The pages and slots that no request owns hold NaN: none may show."""
    bad = sum(int((~out.isfinite()).sum()) for out, _ in outputs)
    failures = [f"{bad} values are NaN or Inf"] if bad else []
    what = "serving: NaN in slots that no request owns stays out"
    demo.verdicts.append(Verdict(what, _millions(outputs), f"{bad} bad", failures))


def _compare_repeat(demo: Demo, wrapper, layer: Inputs, first: Result) -> None:
    again = wrapper.run(layer.q, layer.cache, return_lse=True)
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    failures = [] if same else ["two runs of one plan differ"]
    worst, what = "equal" if same else "differ", "serving: a second run, bit by bit"
    demo.verdicts.append(Verdict(what, _millions([first]), worst, failures))


def _report(demo: Demo, seconds: float) -> int:
    headers = ["batch", "layers", "tokens", "keys", "plan us", "run ms/layer", "TFLOP/s", "variant"]
    ran = Table(headers, frozenset(headers[1:-1]))
    for part in demo.parts:
        case, seconds_of_one = part.case, part.median_run
        speed = f"{flops(case) / seconds_of_one / 1e12:.3g}"
        times = (f"{part.plan_seconds * 1e6:.0f}", f"{seconds_of_one * 1e3:.3g}", speed)
        sizes = (len(part.run_seconds), sum(case.qo_lens), sum(case.kv_lens))
        ran.add(part.name, *sizes, *times, part.variant)
    print(f"\n{ran}\n")
    verified = Table(["verified", "on", "worst", "result"])
    for verdict in demo.verdicts:
        result = "FAILED" if verdict.failures else "ok"
        verified.add(verdict.what, verdict.amount, verdict.worst, result)
    print(f"{verified}\n")
    for sentence in demo.left_out:
        print(f"left out: {sentence}")
    if not demo.scale.full:
        print(f"Scaled down: {demo.scale}.")
    failures = [failure for verdict in demo.verdicts for failure in verdict.failures]
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{'FAILED' if failures else 'all verified'} in {seconds:.1f} s")
    return 1 if failures else 0
