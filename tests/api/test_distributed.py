"""Context-parallel prefill computes what one device does, by gloo and by NCCL."""

from __future__ import annotations

import math

import preflash
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from preflash.distributed import context_parallel_prefill, join_chunks, own_chunks


def expected_of(q, k, v, lengths, **options):
    parts = [
        preflash.single_prefill_with_kv_cache_return_lse(*one, **options)
        for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    return [torch.cat(x) for x in zip(*parts, strict=True)]


def ranks_of(rank, world, meeting, device_type, dtype, cases, tolerance):
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    kind, place = ("gloo", None) if device.type == "cpu" else ("nccl", device)
    dist.init_process_group(
        kind, init_method=f"file://{meeting}", rank=rank, world_size=world, device_id=place
    )
    try:
        for lengths, heads, kv_heads, (dim, dim_vo), causal, soft_cap in cases:
            generator = torch.Generator().manual_seed(sum(lengths))
            shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_vo))
            q, k, v = (
                torch.randn(sum(lengths), *s, generator=generator).to(device, dtype) for s in shapes
            )
            options = {"causal": causal, "logits_soft_cap": soft_cap}
            expected, expected_lse = expected_of(q, k, v, lengths, **options)
            spread = {"seq_lens": lengths}
            if len(lengths) == 1 and lengths[0] % (2 * world) == 0:
                spread = {}
            own = [own_chunks(x, **spread) for x in (q, k, v)]
            out, lse = context_parallel_prefill(*own, **spread, **options)
            torch.testing.assert_close(join_chunks(out, **spread), expected, **tolerance)
            lse = join_chunks(lse, **spread)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
        bits = torch.arange(16, dtype=torch.uint8, device=device)[:, None]
        eight, lens = bits.view(torch.float8_e4m3fn), [11, 5]
        back = join_chunks(own_chunks(eight, seq_lens=lens), seq_lens=lens)
        assert torch.equal(back.view(torch.uint8), bits)
        x, double = [torch.zeros(5, 2, 64)] * 3, [*own[:2], own[2].double()]
        nan, short = {**spread, "sm_scale": math.nan}, {"seq_lens": [16 - 2 * world]}
        refused = [
            (own_chunks, torch.zeros(2 * world + 1), {}, "a multiple of .*or give seq_lens"),
            (context_parallel_prefill, double, spread, r"v is torch\.float64"),
            (context_parallel_prefill, own, nan, "sm_scale=nan"),
            (context_parallel_prefill, x, {}, "q has 5 tokens; must be even"),
            (context_parallel_prefill, x, {"seq_lens": [2 * world]},
             f"q has 5 tokens; rank {rank} of {world} has 2"),
            (join_chunks, own_chunks(eight, seq_lens=[16]), short,
             "x has .* tokens; this rank has"),
        ]  # fmt: skip
        for call, tensors, given, says in refused if world > 1 else refused[:-1]:
            with pytest.raises(TypeError if "float64" in says else ValueError, match=says):
                call(*(tensors if isinstance(tensors, list) else [tensors]), **given)
        # Every rank's call was refused, and the next call waits for nothing of it.
        out, _ = context_parallel_prefill(*own, **spread, **options)
        torch.testing.assert_close(join_chunks(out, **spread), expected, **tolerance)
    finally:
        dist.destroy_process_group()


CASES = [
    # lengths, heads, KV heads, head_dim of k and v, causal, soft cap
    ([8], 2, 1, (64, 64), True, None),
    ([336], 4, 2, (64, 64), True, None),
    ([336], 4, 1, (64, 64), False, None),
    ([509], 2, 2, (40, 40), True, 3.0),
    ([331], 8, 1, (64, 64), False, None),
    ([75, 1, 200, 3], 4, 1, (64, 64), True, None),
    ([130, 77], 4, 4, (192, 128), True, None),
    ([5, 160], 4, 2, (64, 64), False, None),
]


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_processes(world, tmp_path):
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    arguments = (world, tmp_path / "meeting", "cpu", torch.float32, CASES, tolerance)
    mp.start_processes(ranks_of, arguments, nprocs=world, start_method="fork")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gpus(world, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"{torch.cuda.device_count()} GPU")
    cases = [*CASES[1:], ([8192], 32, 8, (128, 128), True, None)]
    tolerance = {"rtol": 0.02, "atol": 0.02}
    arguments = (world, tmp_path / "meeting", "cuda", torch.bfloat16, cases, tolerance)
    mp.start_processes(ranks_of, arguments, nprocs=world, start_method="spawn")
