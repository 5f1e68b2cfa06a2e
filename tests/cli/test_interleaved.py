"""Interleaved timing runs every call as often as every other, and after each of them."""

import statistics
from itertools import pairwise

from preflash.testing import timing

NAMES = ("ours", "theirs", "another")


class Replay:
    """Each sample takes one microsecond more than the one before, whoever takes it."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def sample(self):
        self.order.append(self.name)
        return float(len(self.order))


def test_interleaved_samples_each_after_each():
    order = []
    times = timing.interleaved({name: Replay(name, order) for name in NAMES}, samples=21)
    assert list(times) == list(NAMES)
    for name in NAMES:
        taken = [index for index, who in enumerate(order, start=1) if who == name]
        assert len(taken) == 21
        assert times[name] == statistics.median(taken)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(one) == sorted(NAMES) for one in rounds)
    neighbours = set(pairwise(order))
    assert {(a, b) for a in NAMES for b in NAMES if a != b} <= neighbours


def test_interleaved_of_nothing():
    assert timing.interleaved({}, samples=3) == {}
