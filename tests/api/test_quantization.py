"""packbits and segment_packbits pack as numpy does."""

import itertools

import numpy
import preflash
import pytest
import torch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BIT_ORDERS = pytest.mark.parametrize("bitorder", ["big", "little"])


def drawn(n):
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5


def check(packed, expected, target):
    assert packed.dtype == torch.uint8
    assert packed.device.type == target.device
    assert numpy.array_equal(packed.cpu().numpy(), expected)


@BIT_ORDERS
@pytest.mark.parametrize("value", [True, 5, 128], ids=["bool", "uint8", "highest bit"])
def test_packbits(target, bitorder, value):
    for n in (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 1000, 4097):
        bits = drawn(n)
        x = bits.to(torch.bool if value is True else torch.uint8) * value
        packed = preflash.packbits(target.to(x), bitorder)
        check(packed, numpy.packbits(bits.numpy(), bitorder=bitorder), target)


def test_big_is_the_default(target):
    x = target.to(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]).bool())
    assert preflash.packbits(x).tolist() == [128, 128]
    assert preflash.packbits(x, bitorder="little").tolist() == [1, 1]
    packed, _ = preflash.segment_packbits(x[5:], target.to(ints(0, 3, 4)))
    assert packed.tolist() == [0, 128]
    assert preflash.packbits(x[::4]).tolist() == [160]


# odd, empty between, one, none, only empty, long
SEGMENTS = ([3, 8, 13, 1], [0, 5, 0, 0, 16, 7, 0], [77], [], [0, 0], [1000, 1, 999, 4096])


@BIT_ORDERS
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_segment_packbits(target, bitorder, dtype):
    for lengths in SEGMENTS:
        bits, indptr = drawn(sum(lengths)), ints(0, *itertools.accumulate(lengths))
        x = target.to(bits.to(dtype))
        packed, ends = preflash.segment_packbits(x, target.to(indptr), bitorder)
        pieces = [numpy.packbits(piece.numpy(), bitorder=bitorder) for piece in bits.split(lengths)]
        check(packed, numpy.concatenate([numpy.zeros(0, numpy.uint8), *pieces]), target)
        assert (ends.dtype, ends.device.type) == (torch.int32, target.device)
        assert ends.tolist() == [0, *itertools.accumulate((n + 7) // 8 for n in lengths)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
def test_any_dtype(target, dtype):
    """Packs every nonzero value as 1, even one that a cast to bytes would lose."""
    x = torch.tensor([0, 1, 2, 0, -1, 0, 3, 0, 1, 0]).to(dtype)
    if dtype.is_floating_point:
        x = x / 256
        x[3], x[5] = float("nan"), -0.0
    else:
        x[2] = 64 if dtype == torch.int8 else 1 << 40
    expected = preflash.packbits((x != 0).to(target.device), "little")
    assert torch.equal(preflash.packbits(target.to(x), "little"), expected)
    assert expected.tolist()[0] == (0b01011110 if dtype.is_floating_point else 0b01010110)


BITS, ROWS = torch.ones(8).bool(), torch.ones(2, 4).bool()
REFUSED = [
    ("packbits", (BITS, "middle"), ValueError, "bitorder"),
    ("packbits", (BITS, None), TypeError, "bitorder"),
    ("packbits", (ROWS,), ValueError, r"\bx\b"),
    ("packbits", ([1, 0, 1],), TypeError, r"\bx\b"),
    ("segment_packbits", (BITS, ints(0, 8), "big "), ValueError, "bitorder"),
    ("segment_packbits", (BITS, ints(0, 9)), ValueError, "indptr"),
    ("segment_packbits", (BITS, ints(0, 5, 4, 8)), ValueError, "indptr"),
    ("segment_packbits", (BITS, ints()), ValueError, "indptr"),
    ("segment_packbits", (BITS, ints(0, 8).float()), TypeError, "indptr"),
    ("segment_packbits", (ROWS, ints(0, 8)), ValueError, r"\bx\b"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "says"), REFUSED)
def test_refusals(name, arguments, error, says):
    with pytest.raises(error, match=says):
        getattr(preflash, name)(*arguments)
