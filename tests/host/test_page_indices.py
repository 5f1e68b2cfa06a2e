"""A batch's page indices: copied, the largest found, and none negative, whatever their number."""

import numpy as np
import pytest
from preflash import _core

COUNTS = (*range(40), 63, 64, 65, 1000)


def batch_of(begin: int, end: int) -> _core.Batch:
    """One request that owns the pages [begin, end)."""
    qo_indptr, kv_indptr = np.array([0, 1], "<i4"), np.array([begin, end], "<i4")
    last_page_len = np.array([1], "<i4")
    arrays = (qo_indptr, kv_indptr, last_page_len)
    addresses = (array.ctypes.data for array in arrays)
    return _core.Batch(_core.BatchArrays(*addresses, num_requests=1), page_size=16)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("count", COUNTS)
def test_largest(count, begin):
    pages = np.random.default_rng(count).permutation(begin + count).astype("<i4")
    pages[:begin] = -5  # nobody's
    batch = batch_of(begin, begin + count)
    largest = max(pages[begin:], default=-1)
    assert batch.set_page_indices(pages.ctypes.data, len(pages)) == largest
    assert batch.largest_page_of(pages.ctypes.data, len(pages)) == largest
    assert batch.page_indices == pages.tolist()
    assert batch.set_page_indices(pages[::-1].copy().ctypes.data, 0) == -1


@pytest.mark.parametrize("count", COUNTS[1:-1])
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
