"""The quick way from plan()'s arrays to a batch: it takes usual ones alone, and leaves the rest to
the checks that say what is wrong."""

import pytest
import torch
from preflash import _core
from preflash._check import values as check

NOTHING = (lambda: False, lambda: False, torch.autograd)
OLDER_TORCH = _core.Torch(object, *NOTHING)  # which C++ cannot read
PAGED_BATCH = {
    name: _core.paged_batches(one) for name, one in (("torch", check.TORCH), ("older", OLDER_TORCH))
}


@pytest.fixture(params=PAGED_BATCH)
def paged_batch(request):
    return PAGED_BATCH[request.param]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arrays() -> dict[str, torch.Tensor]:
    return {
        "qo_indptr": ints(0, 3, 5),
        "kv_indptr": ints(1, 3, 6),
        "page_indices": ints(-1, 7, 2, 9, 4, 5),
        "last_page_len": ints(4, 16),
    }


def test_a_usual_batch(paged_batch):
    batch, largest = paged_batch(*arrays().values(), 16, None, None)
    assert largest == 9
    assert (batch.num_requests, batch.page_size) == (2, 16)
    assert batch.qo_indptr == [0, 3, 5]
    assert batch.kv_indptr == [1, 3, 6]
    assert batch.last_page_len == [4, 16]
    assert batch.page_indices == [-1, 7, 2, 9, 4, 5]  # the first is nobody's


def test_a_ragged_batch(paged_batch):
    given = arrays()
    batch, largest = paged_batch(given["qo_indptr"], given["kv_indptr"], None, None, 0, None, None)
    assert largest is None
    assert (batch.num_requests, batch.page_size) == (2, 0)
    assert (batch.qo_indptr, batch.kv_indptr) == ([0, 3, 5], [1, 3, 6])
    assert batch.last_page_len == batch.page_indices == []
    assert (
        paged_batch(given["qo_indptr"], given["kv_indptr"][:-1], None, None, 0, None, None) is None
    )


def test_parts_of_larger_arrays(paged_batch):
    larger = {name: torch.cat([ints(77), value])[1:] for name, value in arrays().items()}
    larger["page_indices"] = torch.cat([larger["page_indices"], ints(1000, -1000)])
    batch, largest = paged_batch(*larger.values(), 16, None, None)
    assert largest == 9
    assert batch.kv_indptr == [1, 3, 6]
    assert batch.page_indices == [-1, 7, 2, 9, 4, 5]


def test_negative_pages_are_refused(paged_batch):
    given = arrays() | {"page_indices": ints(0, 7, 2, -9, 4, 5)}
    with pytest.raises(ValueError, match=r"paged_kv_indices holds -9; page indices start at 0"):
        paged_batch(*given.values(), 16, None, None)


def freed(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def too_long_for_its_storage(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(value.nbytes - 4)
    return value


UNUSUAL = {
    "list": torch.Tensor.tolist,
    "none": lambda value: None,
    "int64": torch.Tensor.long,
    "float": torch.Tensor.float,
    "two dimensions": lambda value: value[None],
    "strided": lambda value: torch.stack([value, value], dim=1)[:, 0],
    "subclass": lambda value: torch.nn.Parameter(value, requires_grad=False),
    "meta": lambda value: value.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "freed": freed,
    "short of storage": too_long_for_its_storage,
    "shorter": lambda value: value[:-1],
}


def check_no_pages(found):
    """The lengths alone."""
    batch, largest = found
    assert largest is None
    assert batch.last_page_len == [4, 16]
    assert batch.page_indices == []


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", arrays())
def test_unusual_arrays_are_left_alone(paged_batch, name, kind):
    given = arrays()
    given[name] = UNUSUAL[kind](given[name])
    found = paged_batch(*given.values(), 16, None, None)
    if name == "page_indices":
        check_no_pages(found)
    else:
        assert found is None


def test_page_indices_of_an_indptr_that_ends_below_zero_are_left_alone(paged_batch):
    given = arrays() | {"kv_indptr": ints(1, 3, -6)}
    check_no_pages(paged_batch(*given.values(), 16, None, None))


@pytest.mark.parametrize("uploaders", [0, 1])
def test_many_page_indices(paged_batch, uploaders):
    """Each batch has its own, whichever memory they are in and whoever had that before."""
    uploader = _core.Uploader(-1) if uploaders else None
    one, two = ints(0, 1), ints(7)
    kept = []
    for i, count in enumerate((20_000, 30_000, 16_383, 16_384, 70_000, 20_000)):
        pages = torch.randperm(count, dtype=torch.int32)
        batch, largest = paged_batch(one, one * count, pages, two, 16, uploader, None)
        assert largest == count - 1
        kept.append((batch, pages.tolist()))
        pages.fill_(-1)
        with pytest.raises(ValueError, match="paged_kv_indices holds -1;"):
            paged_batch(one, one * count, pages, two, 16, uploader, None)
        if i % 2:
            del kept[0]
        for batch, expected in kept:
            assert batch.page_indices == expected


def test_what_a_mode_raises_is_not_lost(paged_batch):
    class Interrupting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise KeyboardInterrupt

    given = tuple(arrays().values())
    with pytest.raises(KeyboardInterrupt), Interrupting():
        paged_batch(*given, 16, None, None)


def test_pages_that_a_graph_reads_in_its_buffer():
    """The batch takes none over; too many for the buffer are left to the check that says so."""
    batch, largest = PAGED_BATCH["torch"](
        *arrays().values(), 16, None, torch.zeros_like(ints(*range(6)))
    )
    assert largest == 9
    assert batch.page_indices == []
    check_no_pages(PAGED_BATCH["torch"](*arrays().values(), 16, None, ints(*range(5))))
    negative = arrays() | {"page_indices": ints(0, 7, 2, -9, 4, 5)}
    with pytest.raises(ValueError, match=r"paged_kv_indices holds -9; page indices start at 0"):
        PAGED_BATCH["torch"](*negative.values(), 16, None, ints(*range(6)))
