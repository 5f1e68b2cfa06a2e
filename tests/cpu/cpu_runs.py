"""Runs of the cpu backend, and comparisons of their bits."""

import torch
from preflash.testing import Inputs, runner


def result(inputs: Inputs, **overrides) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and LSE of a fresh wrapper."""
    return runner.run(runner.planned(inputs, backend="cpu", **overrides), inputs)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
