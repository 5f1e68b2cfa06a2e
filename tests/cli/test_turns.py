"""Timing in turns: every contender as often as any other, and after each of them."""

from itertools import pairwise

from preflash.testing import timing

NAMES = ("ours", "theirs", "another")


class Replay:
    """Takes as long as its turn is late, so that no two samples are alike."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def sample(self):
        self.order.append(self.name)
        return float(len(self.order))


def test_in_turns_samples_everybody_after_everybody():
    order = []
    times = timing.in_turns({name: Replay(name, order) for name in NAMES}, samples=21)
    assert list(times) == list(NAMES)
    for name in NAMES:
        taken = [turn for turn, who in enumerate(order, start=1) if who == name]
        assert times[name] == timing.Timing.of([float(turn) for turn in taken])
        assert times[name].samples == 21
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(one) == sorted(NAMES) for one in rounds)
    neighbours = set(pairwise(order))
    assert {(a, b) for a in NAMES for b in NAMES if a != b} <= neighbours


def test_in_turns_of_nobody():
    assert timing.in_turns({}, samples=3) == {}
