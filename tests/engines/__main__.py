"""Runs engines' FlashInfer backends: python -m tests.engines --help."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from .serving import GENERATED, Model, Shape, check, generate

PATHS = ("eager", "chunked", "prefix", "graph")
OPTIONS = {
    "fp16": {},
    "bf16": {"dtype": torch.bfloat16},
    "capped": {"soft_cap": 30.0},
    "window": {"sliding_window": 33},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines")
    parser.add_argument("--vllm", type=Path, nargs="*", default=[], help="directories with vllm/")
    parser.add_argument("--sglang", type=Path, nargs="*", default=[], help="directories with sglang/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", action="store_true", help="FlashInfer's kernels, for comparison")
    parser.add_argument("--time", type=int, default=0, metavar="N", help="times N runs of each path")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    engines = [("vllm", p) for p in options.vllm] + [("sglang", p) for p in options.sglang]
    if len(engines) != 1:
        parser.error("one engine a process: its modules have one name")
    from . import flashinfer_name

    device = torch.device(options.device)
    if device.type != "cuda":
        os.environ.setdefault("PREFLASH_BACKEND", "auto")  # SGLang writes "fa2" into its code
    print("flashinfer's kernels" if options.peer else flashinfer_name.install(), flush=True)
    kind, root = engines[0]
    loaded = importlib.import_module(f"{__package__}.{kind}_engine").load(root, device)
    version = next(
        (p.name.split("-")[1].removesuffix(".dist") for p in root.glob(f"{kind}-*.dist-info")), "?"
    )
    version = version.removesuffix(".dist-info")
    print(f"{kind} {version}, its own modules: {', '.join(loaded.loaded)}", flush=True)
    rows, failed = [], 0
    for name, extra in OPTIONS.items():
        shape = Shape(**extra)
        for path in PATHS:
            row = {"engine": kind, "version": version, "model": name, "path": path}
            row["device"] = device.type
            try:
                model = Model(shape, device)
                engine = loaded.engine(loaded, shape, device, path)
                with torch.inference_mode():
                    requests, logits = generate(engine, model, path)
                    row["worst logit"] = round(check(model, requests, logits), 5)
                row["wrappers"] = [_brief(w) for w in engine.wrappers()]
                if options.time:
                    row.update(_timed(engine, model, path, options.time))
                row["result"] = "ok"
            except Exception as error:
                if options.trace:
                    traceback.print_exc()
                row["result"] = f"{type(error).__name__}: {error}"[:300]
                failed += 1
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return failed > 0


def _brief(wrapper: object) -> str:
    return f"{type(wrapper).__module__.partition('.')[0]}.{type(wrapper).__name__}:{wrapper._backend}"


def _timed(engine, model: Model, path: str, runs: int) -> dict[str, float]:
    """Whole generations, medians."""
    seconds = []
    for _ in range(runs):
        _wait(model.device)
        begin = time.perf_counter()
        with torch.inference_mode():
            requests, _ = generate(engine, model, path)
        _wait(model.device)
        seconds.append(time.perf_counter() - begin)
    median = sorted(seconds)[len(seconds) // 2]
    return {"tokens/s": round(len(requests) * GENERATED / median, 1)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
