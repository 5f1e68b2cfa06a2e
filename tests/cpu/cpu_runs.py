"""Helpers run the cpu backend, take requests out of a batch, and start processes."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import torch
from preflash.testing import Inputs, build, runner


def result(inputs: Inputs, **overrides) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and LSE of a fresh wrapper."""
    return runner.run(runner.planned(inputs, backend="cpu", **overrides), inputs)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rows_of(lengths: tuple[int, ...], request: int) -> slice:
    begin = sum(lengths[:request])
    return slice(begin, begin + lengths[request])


def alone(inputs: Inputs, request: int) -> Inputs:
    """Returns one request of a batch, in the batch's own memory."""
    case = inputs.case
    lengths = {"qo_lens": (case.qo_lens[request],), "kv_lens": (case.kv_lens[request],)}
    one = build(dataclasses.replace(case, **lengths))
    one.q = inputs.q[rows_of(case.qo_lens, request)]
    if case.paged:
        one.cache, one.k, one.v = inputs.cache, inputs.k, inputs.v
        one.page_table = [inputs.page_table[request]]
        one.indices = torch.tensor(inputs.page_table[request], dtype=torch.int32)
    else:
        keys = rows_of(case.kv_lens, request)
        one.k, one.v = inputs.k[keys], inputs.v[keys]
    return one


def python(code: str, **environment: str) -> str:
    """Runs code in a new process and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
