"""A batch copies its page indices, finds the largest and refuses negative ones."""

import numpy as np
import pytest
from preflash import _core


def batch_of_pages(*indptr: int) -> _core.Batch:
    """Returns a batch of requests that own the pages [indptr[i], indptr[i + 1])."""
    n = len(indptr) - 1
    arrays = [np.array(values, "<i4") for values in (range(n + 1), indptr, [1] * n)]
    addresses = (array.ctypes.data for array in arrays)
    return _core.Batch(_core.BatchArrays(*addresses, num_requests=n), page_size=16)


@pytest.mark.parametrize("begin", [0, 3])
def test_the_largest_of_the_pages_that_requests_own(begin):
    for count in (*range(40), 63, 64, 65, 1000):
        pages = np.random.default_rng(count).permutation(begin + count).astype("<i4")
        pages[:begin] = -5  # of no request
        batch = batch_of_pages(begin, begin + count)
        for find in (batch.set_page_indices, batch.largest_page_of):
            assert find(pages.ctypes.data, len(pages)) == max(pages[begin:], default=-1)
        assert batch.page_indices == pages.tolist()
        assert batch.set_page_indices(pages[::-1].copy().ctypes.data, 0) == -1


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_every_position_counts(count):
    batch = batch_of_pages(0, count)
    for position in range(count):
        pages = np.zeros(count, "<i4")
        pages[position] = 2**31 - 1
        assert batch.set_page_indices(pages.ctypes.data, count) == 2**31 - 1
        pages[position] = -(2**31) if position % 2 else -1
        for find in (batch.set_page_indices, batch.largest_page_of):
            with pytest.raises(ValueError, match=f"paged_kv_indices holds {pages[position]};"):
                find(pages.ctypes.data, count)


def test_block_tables():
    """Every page of a request counts; entries of no request do not. The size fits int32."""
    batch, table = batch_of_pages(0, 2, 3), np.full((2, 4), 99, "<i4")
    batch.use_block_table(4)
    for last in (0, 1):
        table[0, :2], table[1, 0] = [1, 5 - last], 4 + last
        assert batch.largest_page_of(table.ctypes.data, table.size) == 5
        assert batch.page_entries == 5
    batch.use_block_table(2**30 - 1)
    with pytest.raises(ValueError, match="a block table of 2 rows that are 1073741824"):
        batch.use_block_table(2**30)
