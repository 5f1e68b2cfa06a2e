"""The programs of docs/examples run: serve.py draws the tokens of a loop without cache or batch,
those that measure print a table."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from preflash.testing import oracle
from preflash.testing.oracle import Pipeline
from torch.distributed.elastic.utils.distributed import get_free_port

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import serve

    yield serve
    for name in ("serve", "model", "batch"):
        del sys.modules[name]


def plain_logits(example, model, tokens, device):
    pipeline = Pipeline(example.DIM**-0.5, causal=True)

    def attend(layer, q, k, v):
        return oracle.attend(q.cpu(), k.cpu(), v.cpu(), pipeline).out.to(q)

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


def rows_of(text):
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return table[2:]


def test_throughput(monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.20")
    if torch.cuda.is_available():
        pytest.skip("it would take a minute")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--layers", "1", "--rounds", "1"])
    import throughput

    throughput.main()
    rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["preflash", "torch varlen", "sdpa", "eager"]
    for name, *cells in rows:
        for cell in cells:  # torch has its operator on GPUs alone
            assert "NotImplementedError" in cell if name == "torch varlen" else cell[0].isdigit()


def rank_of_context_parallel(rank, port):
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun sets them
    os.environ.update(**ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["context_parallel.py", "256", "512"]
    runpy.run_path(str(EXAMPLES / sys.argv[0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="forked processes cannot use CUDA")
def test_context_parallel(capfd):
    port = get_free_port()
    mp.start_processes(rank_of_context_parallel, (port,), nprocs=2, start_method="fork")
    rows = rows_of(capfd.readouterr().out)
    assert [row[:2] for row in rows] == [["256", "2"], ["512", "2"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
