"""Interleaved timing runs every call as often as every other, and after each of them."""

import statistics
from itertools import pairwise

import pytest
from preflash.testing import timing


class Replay:
    """Each sample takes one microsecond more than the one before, whoever takes it."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def sample(self):
        self.order.append(self.name)
        return float(len(self.order))


@pytest.mark.parametrize("names", [("ours", "theirs", "another"), ()], ids=["three", "none"])
def test_interleaved_samples_each_after_each(names):
    order = []
    times = timing.interleaved({name: Replay(name, order) for name in names}, samples=21)
    taken = {name: [i for i, who in enumerate(order, 1) if who == name] for name in names}
    assert times == {name: statistics.median(samples) for name, samples in taken.items()}
    assert all(len(samples) == 21 for samples in taken.values())
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(one) == sorted(names) for one in rounds)
    assert {(a, b) for a in names for b in names if a != b} <= set(pairwise(order))
