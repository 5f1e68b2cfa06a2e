"""docs/examples/serve.py draws the tokens of a loop without cache or batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import serve

    yield serve
    for name in ("serve", "model", "batch"):
        del sys.modules[name]


def plain_logits(example, model, tokens, device):
    """Computes every token of one request at once, causal, in torch operations."""

    def attend(layer, q, k, v):
        k, v = (x.repeat_interleave(example.HEADS // example.KV_HEADS, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * example.DIM**-0.5
        n = len(q)
        hidden = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    positions = torch.arange(len(tokens), device=device)
    return model(torch.tensor(tokens, device=device), positions, attend)


def test_tokens_equal_a_plain_loop(example, target, monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", target.backend)
    on_cpu = target.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    torch.manual_seed(3)
    # More than fit at once, chunks and whole prompts.
    lengths = (5, 70, 33, 1, 17, 40, 64, 9, 16, 2)
    prompts = [torch.randint(example.VOCAB, (n,)).tolist() for n in lengths]
    goals = (7, 3, 9, 8, 1, 6, 5, 9, 4, 8)
    served = example.serve(prompts, goals, target.device, dtype)

    exact = example.Model(target.device, dtype)
    exact.layers = [[w.float() for w in layer] for layer in exact.layers]
    exact.embedding, exact.head = exact.embedding.float(), exact.head.float()
    rounding = 0.0 if on_cpu else 0.15  # of logits about 1 in size, in bfloat16
    for prompt, goal, tokens in zip(prompts, goals, served, strict=True):
        assert tokens[: len(prompt)] == prompt
        assert len(tokens) == len(prompt) + goal
        logits = plain_logits(example, exact, tokens, target.device)[len(prompt) - 1 : -1]
        chosen = torch.tensor(tokens[len(prompt) :], device=target.device)
        missed = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        assert missed.max() <= rounding
