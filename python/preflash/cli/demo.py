"""`demo`: batch prefill over a paged KV cache, planned once, run for many layers, and verified: the
example of FlashInfer's documentation with its custom-mask half, and a batch as a serving engine
forms it. Sampled rows of every layer are compared with a float64 oracle."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch

import preflash as flashinfer

from ..testing import Case, Inputs, KvForm, MaskKind, oracle, runner
from ..testing.case import flops
from . import CommandError, text
from .batches import Sample, batches
from .console import Table, progress
from .machine import Place, choose_places

_WORKSPACE_BYTES = 128 * 1024 * 1024
_ROWS_PER_REQUEST = 4
_PLAN_REPEATS = 5
_LAYERS = 32
# Inputs and outputs of one full-size serving layer, with room to make them.
_SERVING_LAYER_BYTES = 400 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of the demo on this machine, which its output states."""

    example_layers: int = _LAYERS
    serving_layers: int = _LAYERS
    serving_divisor: int = 1  # lengths of the serving batch are divided by it

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Scale:
        if quick:
            return cls(2, 2, 32)
        if device.type == "cpu":
            return cls(serving_layers=8, serving_divisor=4)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(serving_layers=min(_LAYERS, max(2, free // _SERVING_LAYER_BYTES)))


# (new tokens, keys) of 16 requests: fresh prompts, chunks appended to long contexts, decoding ones.
_SERVING = (
    *((n, n) for n in (4096, 2048, 1500, 1024, 777, 64, 33)),
    *((512, 8192), (512, 4096), (256, 2048), (128, 1024), (16, 2000), (4, 1000)),
    *((1, n) for n in (4096, 1777, 1)),
)


class Demo:
    """State that the parts of the demo share, and the tables that they fill."""

    def __init__(self, place: Place, backend: str, scale: Scale, step: Callable[[str], None]):
        self.place, self.backend, self.scale, self.step = place, backend, scale, step
        sizes = dict.fromkeys(["layers", "tokens", "keys"], "d")
        times = {"plan us": ".0f", "run ms/layer": ".3g", "TFLOP/s": ".3g"}
        self.ran = Table({"batch": "", **sizes, **times, "variant": ""})
        self.verified = Table(dict.fromkeys(["verified", "on", "worst", "result"], ""))
        self.failures: list[str] = []
        self.left_out: list[str] = []

    def verify(self, what: str, amount: str, worst: str, failures: list[str]) -> None:
        self.verified.add(what, amount, worst, "FAILED" if failures else "ok")
        self.failures += failures

    def timed(self, call: Callable[[], object]) -> tuple[object, float]:
        """The call's result and its wall time, the device's work included."""
        self.place.synchronize()
        start = time.perf_counter()
        result = call()
        self.place.synchronize()
        return result, time.perf_counter() - start


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
    with progress(steps, "demo") as step:
        demo = Demo(place, backend, scale, step)
        _example(demo)
        _serving(demo)
    return _report(demo, time.monotonic() - start)


Result = tuple[torch.Tensor, torch.Tensor]
_STORED = {"mask": MaskKind.CAUSAL, "page_size": 16, "form": KvForm.COMBINED}


def _example(demo: Demo) -> None:
    """The example of the documentation: 7 requests, 64/16 heads, head_dim 128, page 16, float16."""
    lengths = ((33, 11, 11, 11, 11, 11, 12), (257, 183, 238, 52, 275, 529, 448))
    case = Case("documented example", *lengths, 64, 16, 128, dtype=torch.float16, **_STORED)
    wrapper, layers, outputs = _part(demo, "example, causal", case, demo.scale.example_layers)
    pairs = zip(*lengths, strict=True)
    masks = [oracle.kept(layers[0].pipeline, n, s, device=layers[0].q.device) for n, s in pairs]
    options = {"custom_mask": torch.cat([mask.flatten() for mask in masks]), "causal": False}
    try:
        masked = _run_layers(demo, wrapper, layers, "the same, custom mask", **options)
    except NotImplementedError as error:  # a build without that kernel
        demo.left_out.append(f"example, custom mask: {error}")
        for _ in layers:
            demo.step("example: left out")
        return
    # Every value, with the tolerance of the documented example.
    worst, failures = 0.0, []
    for index, ((out, _), (other, _)) in enumerate(zip(masked, outputs, strict=True)):
        worst = max(worst, float((out.float() - other.float()).abs().max()))
        if not torch.allclose(out, other, rtol=1e-3, atol=1e-3):
            failures.append(f"layer {index}: outputs differ by {worst:.3g}")
    what = "example, custom mask = causal"
    demo.verify(what, _millions(masked), f"{worst:.1e} apart", failures)


def _serving(demo: Demo) -> None:
    """16 requests of mixed lengths, GQA 32/8, head_dim 128, page 16, bfloat16, shuffled pages."""
    divisor = demo.scale.serving_divisor
    lengths = [tuple(-(-n // divisor) for n in side) for side in zip(*_SERVING, strict=True)]
    case = Case("serving batch", *lengths, 32, 8, 128, **_STORED)
    wrapper, layers, outputs = _part(demo, "serving", case, demo.scale.serving_layers)
    # The pages and slots that no request owns hold NaN.
    bad = sum(int((~out.isfinite()).sum()) for out, _ in outputs)
    failures = [f"{bad} values are NaN or Inf"] if bad else []
    what = "serving: NaN in slots that no request owns stays out"
    demo.verify(what, _millions(outputs), f"{bad} bad", failures)
    again = wrapper.run(layers[0].q, layers[0].cache, return_lse=True)
    same = all(map(torch.equal, outputs[0], again))
    failures = [] if same else ["two runs of one plan differ"]
    worst, what = "equal" if same else "differ", "serving: a second run, bit by bit"
    demo.verify(what, _millions(outputs[:1]), worst, failures)


def _millions(outputs: list[Result]) -> str:
    return f"{sum(out.numel() for out, _ in outputs) / 1e6:.1f}M values"


def _part(
    demo: Demo, name: str, case: Case, num_layers: int
) -> tuple[flashinfer.BatchPrefillWithPagedKVCacheWrapper, list[Inputs], list[Result]]:
    """Makes the layers of a batch, plans it once, runs and compares them all."""
    layers = []
    for layer in itertools.islice(batches(case, demo.place.device), num_layers):
        layers.append(layer)
        demo.step(f"{name}: inputs")
    buffer = runner.workspace(demo.place.device, _WORKSPACE_BYTES)
    wrapper = runner.make_wrapper(case, backend=demo.backend, buffer=buffer)
    outputs = _run_layers(demo, wrapper, layers, case.name)
    _compare_rows(demo, name, layers, outputs)
    return wrapper, layers, outputs


def _run_layers(
    demo: Demo, wrapper, layers: list[Inputs], name: str, **plan_options
) -> list[Result]:
    """Plans, again and again, which replaces a plan by its equal. Then (output, LSE) of every
    layer. Adds a line with the median times to the table of what ran."""
    plan = functools.partial(runner.plan, wrapper, layers[0], **plan_options)
    plan_us = 1e6 * statistics.median(demo.timed(plan)[1] for _ in range(_PLAN_REPEATS))
    outputs, seconds = [], []
    for index, layer in enumerate(layers):
        run = functools.partial(wrapper.run, layer.q, layer.cache, return_lse=True)
        result, taken = demo.timed(run)
        outputs.append(result)
        seconds.append(taken)
        demo.step(f"{name}: layer {index}")
    case, median = layers[0].case, statistics.median(seconds)
    sizes = (len(layers), sum(case.qo_lens), sum(case.kv_lens))
    speed = flops(case) / median / 1e12
    demo.ran.add(name, *sizes, plan_us, median * 1e3, speed, wrapper.variant)
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
        demo.step(f"{name}: oracle, layer {index}")
    amount = f"{rows} sampled rows of {len(layers)} layers"
    what = f"{name}: output and LSE against float64"
    demo.verify(what, amount, f"{worst:.2f} of the bound", failures)


def _report(demo: Demo, seconds: float) -> int:
    print(f"\n{demo.ran}\n\n{demo.verified}\n")
    for sentence in demo.left_out:
        print(f"left out: {sentence}")
    if (scale := demo.scale) != Scale():
        part = f"1/{scale.serving_divisor} of the" if scale.serving_divisor > 1 else "the"
        print(
            f"Scaled down: {scale.example_layers} of {_LAYERS} example layers, "
            f"{scale.serving_layers} of {_LAYERS} serving layers with {part} full lengths."
        )
    for failure in demo.failures:
        print(f"FAILED {failure}")
    print(f"{'FAILED' if demo.failures else 'all verified'} in {seconds:.1f} s")
    return 1 if demo.failures else 0
