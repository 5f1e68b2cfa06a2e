"""`variants`: the compiled kernels of this build, filtered, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import re

from .. import _core
from . import CommandError
from .console import Table
from .machine import gpu_kernels_absent, long_name

# Fields of a row of _core.kernels() that are no options of its variant.
_NO_OPTIONS = ("id", "head_dim_qk", "head_dim_vo", "tile", "second_tile", "smem_bytes")


def execute(args: argparse.Namespace) -> int:
    kernels = sorted(_core.kernels(), key=lambda kernel: kernel["id"])
    serving = None if args.head_dim is None else _ids_that_serve(args.head_dim, kernels)
    chosen = [
        kernel
        for kernel in kernels
        if args.family in (None, kernel["family"], kernel["backend"])
        and (args.dtype is None or long_name(kernel["q_dtype"]) == long_name(args.dtype))
        and (serving is None or kernel["id"] in serving)
    ]
    if not chosen:
        raise CommandError(_nothing_left(kernels, args))
    if args.json:
        print(json.dumps(chosen, indent=2))
        return 0
    print(_table(chosen, args.head_dim))
    serve = f" serve head_dim {args.head_dim}" if serving is not None else ""
    print(f"{len(chosen)} of {len(kernels)} compiled variants{serve}")
    if absent := gpu_kernels_absent():
        print(f"no GPU kernels: {absent}")
    return 0


def head_dim(kernel: dict) -> str:
    """The head dimensions as ids spell them: 128, or 192x128."""
    qk, vo = kernel["head_dim_qk"], kernel["head_dim_vo"]
    return str(qk) if qk == vo else f"{qk}x{vo}"


def _ids_that_serve(size: str, kernels: list[dict]) -> set[str]:
    """Ids of the kernels that plan() picks for head_dim `size`: the smallest size that covers it,
    for each combination of the other options. 192 means 192x192, and 192x128 if compiled."""
    parsed = re.fullmatch(r"([0-9]+)(?:x([0-9]+))?", size)
    qk, vo = (int(part) if part else None for part in parsed.groups()) if parsed else (0, None)
    if not qk or vo == 0 or qk % 8 or (vo or 0) % 8:
        raise CommandError(
            f"--head-dim {size}: must be a multiple of 8, as in 128, or two of them, that of q and "
            "k and that of v, as in 192x128"
        )
    wanted = {(qk, vo or qk)}
    if vo is None:
        wanted |= {(qk, kernel["head_dim_vo"]) for kernel in kernels if kernel["head_dim_qk"] == qk}
    smallest: dict[tuple, dict] = {}
    for kernel in sorted(kernels, key=lambda k: k["head_dim_qk"] + k["head_dim_vo"]):
        options = tuple(v for name, v in kernel.items() if name not in _NO_OPTIONS)
        for sizes in wanted:
            if kernel["head_dim_qk"] >= sizes[0] and kernel["head_dim_vo"] >= sizes[1]:
                smallest.setdefault((options, sizes), kernel)
    return {kernel["id"] for kernel in smallest.values()}


def _nothing_left(kernels: list[dict], args: argparse.Namespace) -> str:
    given = {"--family": args.family, "--dtype": args.dtype, "--head-dim": args.head_dim}
    asked = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    have = {
        "families": {kernel["family"] for kernel in kernels},
        "dtypes": {kernel["q_dtype"] for kernel in kernels},
        "head_dims": {head_dim(kernel) for kernel in kernels},
    }
    offers = "; ".join(f"{name} {', '.join(sorted(values))}" for name, values in have.items())
    return f"no compiled variant matches {asked or 'anything'}; there are {offers}"


def _table(kernels: list[dict], serving: str | None) -> Table:
    """serving: --head-dim, which kernels of a larger size serve, too; None: not filtered by it."""
    text = dict.fromkeys(["id", "backend", "q", "kv"], "")
    sizes = {"head_dim": "d", "tile m x n": "", "stages": "d", "warps": "d", "smem KiB": ".0f"}
    table = Table({**text, **sizes})
    for kernel in kernels:
        tile, smem = kernel["tile"], kernel["smem_bytes"] / 1024 or None
        about = (kernel["id"], kernel["backend"], kernel["q_dtype"], kernel["kv_dtype"])
        sizes = (f"{tile['m']} x {tile['n']}", tile["stages"], tile["warps"], smem)
        qk, vo = kernel["head_dim_qk"], kernel["head_dim_vo"]
        larger = "" if serving in (None, str(qk), f"{qk}x{vo}") else "up to "
        table.add(*about, larger + head_dim(kernel), *sizes)
    return table
