"""A batch copies its page indices, finds the largest and refuses negative ones."""

import numpy as np
import pytest
from preflash import _core

COUNTS = (*range(40), 63, 64, 65)


def batch_of(begin: int, end: int) -> _core.Batch:
    """Returns a batch of one request that owns the pages [begin, end)."""
    arrays = [np.array(values, "<i4") for values in ([0, 1], [begin, end], [1])]
    addresses = (array.ctypes.data for array in arrays)
    return _core.Batch(_core.BatchArrays(*addresses, num_requests=1), page_size=16)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("count", [*COUNTS, 1000])
def test_the_largest_of_the_pages_that_requests_own(count, begin):
    pages = np.random.default_rng(count).permutation(begin + count).astype("<i4")
    pages[:begin] = -5  # of no request
    batch = batch_of(begin, begin + count)
    for find in (batch.set_page_indices, batch.largest_page_of):
        assert find(pages.ctypes.data, len(pages)) == max(pages[begin:], default=-1)
    assert batch.page_indices == pages.tolist()
    assert batch.set_page_indices(pages[::-1].copy().ctypes.data, 0) == -1


@pytest.mark.parametrize("count", COUNTS[1:])
def test_every_position_counts(count):
    batch = batch_of(0, count)
    for position in range(count):
        pages = np.zeros(count, "<i4")
        pages[position] = 2**31 - 1
        assert batch.set_page_indices(pages.ctypes.data, count) == 2**31 - 1
        pages[position] = -(2**31) if position % 2 else -1
        for find in (batch.set_page_indices, batch.largest_page_of):
            with pytest.raises(ValueError, match=f"paged_kv_indices holds {pages[position]};"):
                find(pages.ctypes.data, count)
