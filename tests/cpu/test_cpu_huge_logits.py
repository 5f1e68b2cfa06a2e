"""Weights are right for logits far beyond 2^24, where one float has no bits left for them.

Every dot product here is exact in float32, so that float64 is what is right.
"""

import dataclasses
import math
from collections.abc import Iterator
from itertools import product

import preflash
import pytest
import torch
from preflash.testing import oracle, runner
from preflash.testing.oracle import Pipeline

DIM, KEYS, ROWS = 16, 333, 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MAGNITUDES = [1.3e8, 2.9e9, 1e30]
FLOAT = torch.float32
in_chunks_or_not = pytest.mark.parametrize(
    "split", [{"disable_split_kv": True}, {"fixed_split_size": 64}], ids=["whole", "64"]
)


@dataclasses.dataclass
class Given:
    """Vectors whose product is the logits: row i's of key j is rows[i] * keys[j] * scale."""

    rows: torch.Tensor
    keys: torch.Tensor
    scale: float = 1.0
    dtype: torch.dtype = FLOAT
    options: dict = dataclasses.field(default_factory=dict)  # of plan()

    def tensors(self) -> list[torch.Tensor]:
        q, k = (torch.zeros(len(x), 1, DIM) for x in (self.rows, self.keys))
        # Two halves of the head dimension, so that the product is a sum as well.
        for tensor, values in ((q, self.rows / 2), (k, self.keys)):
            tensor[:, 0, 3] = tensor[:, 0, 12] = values.float()
        generator = torch.Generator().manual_seed(len(self.keys))
        v = torch.randn(len(self.keys), 1, DIM, generator=generator)
        return [x.to(self.dtype) for x in (q, k, v)]

    def attend(self, split: dict):
        q, k, v = self.tensors()
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(), backend="cpu")
        indptrs = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k))
        options = {"sm_scale": self.scale, "q_data_type": self.dtype, **self.options}
        wrapper.plan(*indptrs, 1, 1, DIM, **options, **split)
        return wrapper.run(q, k, v, return_lse=True)

    def expected(self) -> oracle.Expected:
        options = dict(self.options)
        mask = options.pop("custom_mask", None)
        mask = None if mask is None else mask.view(len(self.rows), len(self.keys))
        scale = torch.tensor(self.scale, dtype=FLOAT).item()
        pipeline = Pipeline(scale, soft_cap=options.pop("logits_soft_cap", 0.0), **options)
        return oracle.attend(*self.tensors(), pipeline, custom=mask)

    def check(self, split: dict) -> None:
        (out, lse), expected = self.attend(split), self.expected()
        bound = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), expected.out, rtol=bound, atol=bound)
        torch.testing.assert_close(lse.double(), expected.lse, rtol=3e-7, atol=1e-5)


def steps(*runs):
    """Returns runs of (length, value), the last of which goes on to the end."""
    values = [value for length, value in runs for _ in range(length)]
    return torch.tensor([*values, *[runs[-1][1]] * KEYS][:KEYS]).double()


def with_winners(*winners):
    keys = torch.ones(KEYS, dtype=torch.float64)
    keys[list(winners)] = 1.0625
    return keys


RISING = torch.linspace(-1.0, 1.0, KEYS).half().double()
ALTERNATING = torch.where(torch.arange(KEYS) % 2 == 1, 1.0, -1.0).double()
# Multiples of the largest key.
PATTERNS = {
    "ties": steps((1, 1.0)),
    "negative ties": steps((1, -1.0)),
    "ties in unequal chunks": steps((3, 1.0), (100, -1.0), (61, 1.0), (1, 0.5)),
    "last key wins": with_winners(KEYS - 1),
    "two win, in two tiles": with_winners(63, 64),
    "three win, far apart": with_winners(0, 130, 332),
    "alternating": ALTERNATING,
    "alternating tiles": torch.where(torch.arange(KEYS) // 64 % 2 == 1, 1.0, -1.0).double(),
    "huge, then ordinary": steps((64, 1.0), (269, 0.0)),
    "ordinary, then huge": steps((64, 0.0), (70, 1.0), (199, 0.0)),
    "negative huge, then ordinary": steps((64, -1.0), (64, 0.0), (205, -1.0)),
    "negative huge, then less": steps((64, -1.0), (100, -0.5), (169, -1.0)),
    "rising": RISING,
    "falling": -RISING,
}


def in_data(magnitude: float, pattern, dtype=FLOAT) -> Given:
    """Returns logits up to a power of two, from q and k as far as the dtype reaches."""
    bits = round(math.log2(magnitude))
    most = 28 if dtype == torch.float16 else bits
    low, high = most // 2, most - most // 2
    rows = torch.full((ROWS,), 2.0**low, dtype=torch.float64)
    return Given(rows, pattern * 2.0**high, scale=2.0 ** (bits - most), dtype=dtype)


def in_scale(magnitude: float, pattern, dtype=FLOAT, rows=ROWS, **options) -> Given:
    return Given(torch.ones(rows), pattern, magnitude, dtype, options)


def patterns() -> Iterator[Given]:
    places = [(in_data, dtype) for dtype in TOLERANCE]
    places += [(in_scale, FLOAT), (in_scale, torch.bfloat16)]
    for (place, dtype), magnitude in product(places, MAGNITUDES):
        for name, pattern in PATTERNS.items():
            # float16 values round to ties in bfloat16.
            if dtype != torch.bfloat16 or name not in ("rising", "falling"):
                yield place(magnitude, pattern, dtype)
    for pattern, scale in product((ALTERNATING, with_winners(63, 64)), (0.0, -1.3e8, -1e30)):
        yield in_scale(scale, pattern)
    for cap in (1e9, 1e20):  # tanh saturates
        yield in_scale(1e30, ALTERNATING, logits_soft_cap=cap)


def masks() -> Iterator[Given]:
    """Masked logits may be larger or smaller; a row that keeps no key is 0, with LSE -inf."""
    mask = torch.rand(ROWS, KEYS, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[1::2, ::3] = False
    mask[3] = False
    mask[4, :200] = False
    for magnitude, largest in product(MAGNITUDES, (1.0, 0.0, -1.0)):
        keys = torch.where(torch.arange(KEYS) % 3 == 0, largest, -1.0)
        yield in_scale(magnitude, keys, custom_mask=mask.flatten())


def neighbouring_floats() -> Iterator[Given]:
    """Weights that are neither 0 nor 1, around 2^24: float32 has just the bits for them."""
    for bits in (20, 23, 24, 25, 26):
        unit = 2.0 ** max(bits - 23, -2)
        offsets = torch.randint(0, 8, (KEYS,), generator=torch.Generator().manual_seed(bits))
        keys = 2.0**bits + unit * offsets.double()
        for scale, sign in product((1.0, 0.5, 1.5, 0.6931472), (1.0, -1.0)):
            yield Given(torch.ones(3), sign * keys, scale)


def neighbouring_maxima() -> Iterator[Given]:
    """Maxima of two chunks one ulp apart, whose products with log2(e) may round to one float."""
    for bits, fraction in product((24, 31, 40, 100), (1.0, 1.2, 1.4, 1.6, 1.8, 1.99)):
        top = torch.tensor(fraction * 2.0**bits, dtype=FLOAT).double()
        keys = torch.where(torch.arange(KEYS) < 150, top, top + 2.0 ** (bits - 23))
        yield Given(torch.ones(2), keys)
        yield Given(torch.ones(2), keys.flip(0))


@in_chunks_or_not
@pytest.mark.parametrize("kind", [patterns, masks, neighbouring_floats, neighbouring_maxima])
def test_weights(kind, split):
    for given in kind():
        given.check(split)


# Multiples of the factor that one row may differ by from the next: huge and not, both signs.
MIXED = [1.0, 2.0**-40, -1.0, 0.0, -(2.0**-30), 2.0**-10, 1.0, -(2.0**-5)]


@in_chunks_or_not
@pytest.mark.parametrize("rows", [3, 33])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_rows_do_not_see_their_neighbours(magnitude, rows, split):
    """Huge and other rows in one vector are right, and bit-identical to each row by itself."""
    given = in_data(magnitude, RISING)
    factors = torch.tensor(MIXED * 5, dtype=torch.float64)[:rows]
    given.rows = factors * given.rows[0]
    given.check(split)
    out, lse = given.attend(split)
    for i in range(min(rows, 8)):
        alike = dataclasses.replace(given, rows=given.rows[i].repeat(rows)).attend(split)
        assert torch.equal(alike[0][i], out[i])
        assert torch.equal(alike[1][i], lse[i])


@in_chunks_or_not
def test_beyond_what_base_two_can_hold(split):
    """Logits that float32 holds and log2(e) times which it does not: the output is still right."""
    given = Given(torch.full((2,), 2.0**60), with_winners(63, 64) * 3e38 / 2.0**60)
    out, lse = given.attend(split)
    torch.testing.assert_close(out.double(), given.expected().out, rtol=1e-5, atol=1e-5)
    assert bool((lse >= torch.finfo(FLOAT).max).all())


@in_chunks_or_not
def test_nan_stays_in_its_row(split):
    given = in_data(1e12, RISING)
    clean = given.attend(split)
    given.rows[2] = math.nan
    others = [0, 1, 3, 4, 5, 6]
    for found, wanted in zip(given.attend(split), clean, strict=True):
        assert torch.equal(found[others], wanted[others])
        assert bool(found[2].isnan().all())
