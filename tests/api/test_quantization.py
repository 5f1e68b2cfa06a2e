"""packbits and segment_packbits against numpy."""

import itertools

import numpy
import preflash
import pytest
import torch

LENGTHS = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 1000, 4097]


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_packbits(target, n, bitorder, dtype):
    bits = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
    x = bits.to(dtype) * (1 if dtype is torch.bool else 5)
    packed = preflash.packbits(target.to(x.to(dtype)), bitorder)
    assert packed.dtype == torch.uint8
    assert packed.device.type == target.device
    assert packed.shape == ((n + 7) // 8,)
    assert numpy.array_equal(packed.cpu().numpy(), numpy.packbits(bits.numpy(), bitorder=bitorder))


def test_packbits_is_big_by_default(target):
    x = target.to(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]).bool())
    assert preflash.packbits(x).tolist() == [128, 128]
    assert preflash.packbits(x, bitorder="little").tolist() == [1, 1]


def test_packbits_of_a_strided_view(target):
    bits = torch.rand(334) < 0.5
    x = target.to(bits)[::2]
    assert numpy.array_equal(preflash.packbits(x).cpu().numpy(), numpy.packbits(bits[::2].numpy()))


SEGMENTS = {
    "odd": [3, 8, 13, 1],
    "empty_between": [0, 5, 0, 0, 16, 7, 0],
    "one": [77],
    "none": [],
    "only_empty": [0, 0],
    "long": [1000, 1, 999, 4096],
}


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_segment_packbits(target, lengths, bitorder, dtype):
    bits = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(7)) < 0.5
    indptr = numpy.cumsum([0, *lengths]).astype(numpy.int32)
    packed, new_indptr = preflash.segment_packbits(
        target.to(bits.to(dtype)), target.to(torch.from_numpy(indptr)), bitorder
    )
    pieces = [
        numpy.packbits(bits[a:b].numpy(), bitorder=bitorder) for a, b in itertools.pairwise(indptr)
    ]
    expected = numpy.concatenate([numpy.zeros(0, numpy.uint8), *pieces])
    assert packed.dtype == torch.uint8
    assert new_indptr.dtype == torch.int32
    assert packed.device.type == new_indptr.device.type == target.device
    assert new_indptr.tolist() == numpy.cumsum([0, *[(n + 7) // 8 for n in lengths]]).tolist()
    assert numpy.array_equal(packed.cpu().numpy(), expected)


def test_segment_packbits_is_big_by_default(target):
    x = target.to(torch.tensor([1, 0, 0, 1]).bool())
    packed, _ = preflash.segment_packbits(x, target.to(torch.tensor([0, 3, 4]).int()))
    assert packed.tolist() == [128, 128]


def test_segment_packbits_feeds_plan(target):
    """The documented route from dense masks to packed_custom_mask."""
    from preflash.testing import Case, MaskKind, build, runner

    case = Case("route", (13, 0, 7), (31, 5, 9), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    lengths = [a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True)]
    indptr = target.to(torch.tensor(numpy.cumsum([0, *lengths])).int())
    packed, _ = preflash.segment_packbits(inputs.custom_mask, indptr, bitorder="little")
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, custom_mask=None, packed_custom_mask=packed)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


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


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: preflash.packbits(torch.ones(8).bool(), "middle"), "bitorder"),
        (lambda: preflash.packbits(torch.ones(8).bool(), None), "bitorder"),
        (lambda: preflash.packbits(torch.ones(2, 4).bool()), r"\bx\b"),
        (lambda: preflash.packbits([1, 0, 1]), r"\bx\b"),
        (lambda: preflash.segment_packbits(torch.ones(8).bool(), ints(0, 8), "big "), "bitorder"),
        (lambda: preflash.segment_packbits(torch.ones(8).bool(), ints(0, 9)), "indptr"),
        (lambda: preflash.segment_packbits(torch.ones(8).bool(), ints(0, 5, 4, 8)), "indptr"),
        (lambda: preflash.segment_packbits(torch.ones(8).bool(), ints()), "indptr"),
        (lambda: preflash.segment_packbits(torch.ones(8).bool(), ints(0, 8).float()), "indptr"),
        (lambda: preflash.segment_packbits(torch.ones(2, 4).bool(), ints(0, 8)), r"\bx\b"),
    ],
)
def test_refusals(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
