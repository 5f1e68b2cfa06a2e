"""Blocks of the block-sparse wrappers are a custom mask of every head for the oracle."""

import itertools
import random

import preflash
import pytest
import torch
from preflash.testing import comparison
from preflash.testing.oracle import Pipeline, attend
from preflash.testing.runner import workspace
from refusals import refused

ROWS, KEYS, HEADS = 37, 48, (4, 2)
VARIABLE = "VariableBlockSparseAttentionWrapper"


def check(out, lse, q, k, v, dense):
    comparison.compare(out, lse, attend(q, k, v, Pipeline(0.2), custom=dense)).check()


def tensors(target, heads=HEADS, dtype=torch.float16, rows=ROWS, keys=KEYS, dim=64):
    made = torch.Generator().manual_seed(3)
    shapes = ((rows, heads[0], dim), (keys, heads[1], dim), (keys, heads[1], dim))
    return [torch.randn(*s, generator=made).to(target.device, dtype) for s in shapes]


def planned(target, **options):
    kept = torch.rand(10, 3, generator=torch.Generator().manual_seed(11)) < 0.5
    indptr = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    wrapper, indices = unplanned(target), kept.nonzero()[:, 1].to(torch.int32)
    wrapper.plan(indptr, indices, ROWS, KEYS, 4, 16, *HEADS, 64, sm_scale=0.2, **options)
    return wrapper, kept.repeat_interleave(4, 0).repeat_interleave(16, 1)[:ROWS]


def unplanned(target, kind="BlockSparseAttentionWrapper"):
    return getattr(preflash, kind)(workspace(target.device), backend=target.backend)


def packed(inside, indptr, rows: int):
    flat = []
    for i, (begin, end) in enumerate(itertools.pairwise(indptr.tolist())):
        height = min(inside.shape[1], rows - i * inside.shape[1])
        flat.append(inside[begin:end].transpose(0, 1)[:height].reshape(-1))
    ends = torch.tensor([0, *itertools.accumulate(map(len, flat))], dtype=torch.int32)
    return preflash.segment_packbits(torch.cat([inside.new_zeros(0), *flat]), ends, "little")[0]


@pytest.mark.parametrize("seed", range(32))
def test_random_blocks(target, seed):
    """Blocks in any order, none of them, no rows and no keys, masks in a last row of blocks that is
    shorter, causal among kept keys; the arrays change after plan()."""
    draw = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    height, width = draw.choice([(1, 1), (3, 16), (7, 3), (16, 8)])
    rows, columns = draw.choice([0, 1, 16, 33]), draw.choice([0, 1, 6])
    heads = draw.choice([(4, 2), (3, 3)])
    q, k, v = tensors(target, heads, rows=rows, keys=columns * width)
    kept = torch.rand(-(-rows // height), columns, generator=made) < draw.choice([0.0, 0.5, 1.0])
    chosen = [row.nonzero().flatten().tolist() for row in kept]
    for row in chosen:
        draw.shuffle(row)
    indptr = torch.tensor([0, *itertools.accumulate(map(len, chosen))])
    indices = torch.tensor([*itertools.chain.from_iterable(chosen)], dtype=torch.int64)
    inside = torch.rand(indices.numel(), height, width, generator=made) < 0.6
    how, causal = draw.choice(["mask", "packed_mask", None]), draw.random() < 0.5
    dense = torch.zeros(rows, columns * width, dtype=torch.bool)
    for i, row in enumerate(chosen):
        for r in range(i * height, min(i * height + height, rows)):
            after = min(i * height + height, rows) - 1 - r  # rows behind it in its block
            for n, (block, key) in enumerate(itertools.product(row, range(width))):
                entry = inside[int(indptr[i]) + n // width, r - i * height, key]
                hidden = not entry if how else causal and n >= len(row) * width - after
                dense[r, block * width + key] = not hidden
    wrapper = unplanned(target)
    masks = {"mask": inside, "packed_mask": packed(inside, indptr, rows)}
    arrays = [x.to(target.device) for x in (indptr, indices, masks.get(how, inside))]
    wrapper.plan(
        arrays[0], arrays[1], rows, columns * width, height, width, *heads, 64,
        **({how: arrays[2]} if how else {}), causal=causal, sm_scale=0.2,
    )  # fmt: skip
    for array in arrays:
        array.zero_()
    out = comparison.poison(q.shape, q.dtype, q.device)
    result, lse = wrapper.run(q, k, v, out=out, return_lse=True)
    assert result is out
    check(out, lse, q, k, v, dense)


def test_output_dtype(target):
    q, k, v = tensors(target, dtype=torch.bfloat16)
    other, _ = planned(target, q_data_type=q.dtype)
    same, _ = planned(target, q_data_type=q.dtype, o_data_type=q.dtype)
    out = torch.empty(q.shape, dtype=torch.float16, device=q.device)
    assert other.run(q, k, v, out=out) is out
    assert torch.equal(out, same.run(q, k, v).to(torch.float16))
    assert torch.equal(other.forward(q, k, v, sm_scale=0.2), out)


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16])
def test_queries_of_e5m2(target, o_dtype):
    eight = torch.float8_e5m2
    q, k, v = (t.to(eight) for t in tensors(target))
    dtypes = {"q_data_type": eight, "kv_data_type": eight, "o_data_type": o_dtype}
    wrapper, dense = planned(target, **dtypes)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.dtype == o_dtype
    check(out, lse, *(t.to(torch.float16) for t in (q, k, v)), dense)


RIGHT = {
    "indptr": torch.tensor([0, *[1] * 8]), "indices": torch.tensor([2]), "M": ROWS, "N": KEYS,
    "R": 5, "C": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64,
}  # fmt: skip
KEPT, THREES = torch.ones(2, 1, 1, dtype=torch.bool), torch.tensor([[3], [3]])
SIZES = {
    "block_mask_map": KEPT, "block_row_sz": THREES, "block_col_sz": THREES, "num_qo_heads": 4,
    "num_kv_heads": 2, "head_dim": 64,
}  # fmt: skip
# The right arguments of plan(), wrong ones, and the refusals.
REFUSED = [
    (RIGHT, {"N": 47}, ValueError, "N=47"),
    (RIGHT, {"indptr": torch.zeros(3, dtype=torch.int32)}, ValueError, "indptr has 3"),
    (RIGHT, {"indptr": torch.tensor([0, 1, *[0] * 7])}, ValueError, r"^indptr\[2\] = 0"),
    (RIGHT, {"indices": torch.tensor([3])}, ValueError, r"\[0, 3\)"),
    (RIGHT, {"indptr": torch.full((9,), 2)}, ValueError, "^indices has 1"),
    (RIGHT, {"indices": torch.tensor([2**32])}, ValueError, "beyond those of"),
    (RIGHT, {"mask": torch.ones(1, 5, 15)}, ValueError, "mask has shape"),
    (RIGHT, {"block_mask": torch.ones(1)}, NotImplementedError, "block_mask"),
    (RIGHT, {"o_data_type": torch.float8_e4m3fn}, TypeError, "o_data_type"),
    (SIZES, {"block_col_sz": torch.tensor([[4], [5]])}, ValueError,
     r"block_col_sz adds up to \[4, 5\]"),
    (SIZES, {"num_qo_heads": 3}, ValueError, "multiple of num_kv_heads"),
    (SIZES, {"block_mask_map": KEPT[:, :, :0]}, ValueError, "block_mask_map"),
    # No number becomes another one in int32.
    *((SIZES, {name: SIZES[name].long() + 2**32}, ValueError, f"{name} holds numbers beyond")
      for name in ("block_mask_map", "block_row_sz", "block_col_sz")),
]  # fmt: skip


def test_refusals(target):
    q, k, v = tensors(target)
    wrappers = [(RIGHT, unplanned(target)), (SIZES, unplanned(target, VARIABLE))]
    for right, options, error, says in REFUSED:
        (wrapper,) = (one for arguments, one in wrappers if arguments is right)
        refused(says, wrapper.plan, error=error, **{**right, **options})
        refused("before plan", wrapper.run, q, k, v)
    wrapper = wrappers[0][1]
    wrapper.plan(**RIGHT)
    refused("N = 48", wrapper.run, q, k[1:], v)


@pytest.mark.parametrize("variable", [False, True], ids=["converted", "of any size"])
def test_outputs_that_are_copied_into(target, variable):
    """Outputs of another dtype, or of blocks of any size."""
    q, k, v = tensors(target)
    if variable:
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        wrapper, wide = unplanned(target, VARIABLE), torch.zeros_like(q)
        whole = (torch.tensor([[ROWS]] * 2), torch.tensor([[KEYS]] * 2))
        wrapper.plan(torch.ones(2, 1, 1, dtype=torch.bool), *whole, *HEADS, 64)
    else:
        wrapper, _ = planned(target, o_data_type=torch.float32)
        wide = torch.zeros_like(q, dtype=torch.float32)
    lse = torch.zeros(q.shape[:2], device=q.device)
    bits = torch.empty(wide.nbytes, dtype=torch.uint8, device=wide.device)
    shared = bits.view(wide.dtype).view(wide.shape)
    sharing = {"out": shared, "lse": bits[: lse.nbytes].view(lse.dtype).view(lse.shape)}
    on_k = wide.view(torch.float16).flatten()[: k.numel()].view(k.shape)
    for error, says, options in (
        (NotImplementedError, "out requires grad", {"out": wide.clone().requires_grad_()}),
        (ValueError, "out has strides", {"out": wide[:1].expand_as(wide)}),
        (ValueError, "lse has strides", {"lse": lse[:1].expand_as(lse)}),
        (TypeError, "out is", {"out": wide.to(torch.float64)}),
        (ValueError, "out has shape", {"out": wide[1:]}),
        (TypeError, "q must be", {"q": None, "out": wide}),
        (ValueError, "shares memory with lse", sharing),
        (ValueError, "out shares memory with k", {"k": on_k, "out": wide}),
    ):
        refused(says, wrapper.run, error=error, **{"q": q, "k": k, "v": v, **options})


def sizes(total: int, count: int, heads: int, unit: int, seed: int) -> torch.Tensor:
    """Returns sizes of blocks that add up to a total for each head, multiples of a unit."""
    made = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(heads):
        cuts = torch.randperm(total // unit - 1, generator=made)[: count - 1].sort().values + 1
        rows.append(torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([total // unit])])))
    return (torch.stack(rows) * unit).to(torch.int32)


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_blocks_of_any_size(target, heads, unit):
    kv_heads, group = heads[1], heads[0] // heads[1]
    q, k, v = tensors(target, heads)
    heights, widths = sizes(ROWS, 5, kv_heads, 1, 1), sizes(KEYS, 4, kv_heads, unit, 2)
    kept = torch.rand(kv_heads, 5, 4, generator=torch.Generator().manual_seed(4)) > 0.4
    kept[0, 1] = False
    wrapper = unplanned(target, VARIABLE)
    arrays = [array.to(target.device) for array in (kept, heights, widths)]
    wrapper.plan(*arrays, *heads, 64, sm_scale=0.2)
    by_head = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    out = comparison.poison(by_head[0].shape, q.dtype, q.device)
    lse = comparison.poison(out.shape[:2], torch.float32, q.device)
    assert wrapper.run(*by_head, out=out, lse=lse) is out
    assert all(map(torch.equal, wrapper.run(*by_head, return_lse=True), (out, lse)))
    flat = torch.empty(kv_heads * ROWS, group, 64, dtype=q.dtype, device=q.device)
    assert torch.equal(wrapper.run(*by_head, out=flat), out)
    assert torch.equal(flat.view(kv_heads, ROWS, -1, 64).transpose(1, 2).flatten(0, 1), out)
    for head in range(kv_heads):
        dense = kept[head].repeat_interleave(heights[head], 0)
        dense = dense.repeat_interleave(widths[head], 1)
        own = slice(head * group, (head + 1) * group)
        got = out[own].transpose(0, 1), lse[own].transpose(0, 1)
        check(*got, q[:, own], k[:, head : head + 1], v[:, head : head + 1], dense)
