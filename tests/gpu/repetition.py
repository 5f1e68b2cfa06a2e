"""A plan that runs twice computes the same bits twice."""

import torch
from preflash.testing import Inputs, runner


def assert_twenty_runs_are_equal(wrapper, inputs: Inputs) -> None:
    """The first of twenty runs of a planned wrapper is right, and the others equal it."""
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse).check()
    for _ in range(19):
        again = runner.run(wrapper, inputs)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
