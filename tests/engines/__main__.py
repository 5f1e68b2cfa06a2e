"""Runs engines' attention backends on preflash: python -m tests.engines --help."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import preflash
import torch

from .serving import Load, Model, Scheduler, Shape, check
from .stand_ins import Finder

SEED = 8  # no near tie of two tokens
FLASHINFER = "attention cascade cudnn decode page pod prefill quantization"
PATHS = ("eager", "chunked", "prefix", "graph")
# Of --time: attention is most of the work.
LONG = Load(
    prompts=(8000, 4000, 4000, 2000, 1000, 500, 100, 2000), generated=33, shared=1024, chunk=4096
)
LONG_SHAPE = {"num_qo_heads": 32, "num_kv_heads": 8, "dtype": torch.bfloat16}
OPTIONS = {
    "fp16": {},
    "bf16": {"dtype": torch.bfloat16},
    "capped": {"soft_cap": 30.0},
    "window": {"sliding_window": 33},
    "fp8 cache": {"dtype": torch.bfloat16, "fp8_cache": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines", description=__doc__, epilog="fetch.py fetches the releases"
    )
    parser.add_argument("releases", type=Path, nargs="+", help="directories such as vllm-0.33.0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", action="store_true", help="FlashInfer's own kernels")
    help_backend = "the engine's own for FlashInfer, or preflash's, which its plugin registers"
    backends = ("FLASHINFER", "PREFLASH")
    parser.add_argument("--backend", choices=backends, default=backends[0], help=help_backend)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    help_time = "times N runs of each path"
    parser.add_argument("--time", type=int, default=0, metavar="N", help=help_time)
    parser.add_argument("--seed", type=int, default=SEED, help="of the weights")
    parser.add_argument("--json", type=Path, help="appends the rows, one a line")
    parser.add_argument("--trace", action="store_true", help="prints tracebacks")
    options = parser.parse_args()
    if len(options.releases) > 1:  # a process each, because their modules have the same names
        others = sys.argv[1:]
        for release in options.releases:
            others.remove(str(release))
        command = [sys.executable, "-m", "tests.engines", *others]
        return max(subprocess.run([*command, str(r)]).returncode for r in options.releases)
    return serve(options.releases[0], options)


def install_flashinfer() -> str:
    """Patches the installed flashinfer, or makes modules of that name of preflash's functions.

    Returns a sentence that says which."""
    if importlib.util.find_spec("flashinfer") is not None:
        return repr(preflash.patch_flashinfer()).splitlines()[0]
    finder, every = Finder(Path(), "flashinfer", real=(), absent=()), {"__version__": "0.7.2"}
    for name in FLASHINFER.split():
        source = importlib.import_module(f"preflash.{name}")
        functions = {public: getattr(source, public) for public in source.__all__}
        finder.values[f"flashinfer.{name}"] = functions
        every |= functions
    finder.values["flashinfer"] = every
    finder.install()
    return "flashinfer is not installed: modules of that name hold preflash's functions"


def serve(root: Path, options: argparse.Namespace) -> int:
    kind, version = root.name.split("-")[:2]
    device = torch.device(options.device)
    if device.type != "cuda":
        os.environ.setdefault("PREFLASH_BACKEND", "auto")  # SGLang writes "fa2" into its code
    load = importlib.import_module(f"{__package__}.{kind}_engine").load
    if options.backend == "FLASHINFER":
        print("flashinfer's kernels" if options.peer else install_flashinfer(), flush=True)
    loaded = load(root, device, options.backend)
    print(f"{root.name}, its own modules: {', '.join(loaded.loaded)}", flush=True)
    rows = []
    models = {"bf16, 32 of 8 heads": LONG_SHAPE} if options.time else OPTIONS
    for name, extra in models.items():
        shape = Shape(**extra)
        for path in options.paths:
            row = {
                "engine": kind, "version": version, "model": name, "path": path,
                "kernels": "flashinfer" if options.peer else "preflash",
                "backend": options.backend, "device": device.type,
            }  # fmt: skip
            try:
                row.update(_run(loaded, shape, device, path, options))
                row["result"] = "ok"
            except Exception as error:
                if options.trace:
                    traceback.print_exc()
                row["result"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return any(row["result"] != "ok" for row in rows)


def _brief(wrapper: object) -> str:
    kind = type(wrapper)
    kernels = getattr(wrapper, "variant", None) or wrapper._backend
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}: {kernels}"


def _run(loaded, shape: Shape, device: torch.device, path: str, options) -> dict:
    model = Model(shape, device, options.seed)
    load = LONG if options.time else Load()
    engine = loaded.engine(loaded, shape, device, path, load)
    replays = {}
    with torch.inference_mode():
        served = Scheduler(engine, model, path, load).serve(replays)
        row = check(model, served, tokens=not options.time)
        row["wrappers"] = sorted({_brief(w) for w in engine.wrappers()})
        if options.time:
            again = (Scheduler(engine, model, path, load) for _ in range(options.time))
            runs = sorted((each.serve(replays) for each in again), key=lambda r: r.total_s)
            median = runs[options.time // 2]
            first = sorted(r.first_token_s for r in runs)[options.time // 2]
            decoded = len(load.prompts) * (load.generated - 1)
            row["ttft_ms"] = round(1e3 * first, 2)
            row["decode_tokens_per_s"] = round(decoded / (median.total_s - median.first_token_s))
    return row


if __name__ == "__main__":
    sys.exit(main())
