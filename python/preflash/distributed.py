"""Context parallelism: attention of one batch over the GPUs of a torch.distributed group.

Every rank holds a part of the tokens. Keys and values go round the ring of ranks, while each rank
attends with its queries to the keys that it has; the partial results merge exactly.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .cascade import merge_state_in_place
from .prefill import single_prefill_with_kv_cache_return_lse

__all__ = ["context_parallel_prefill", "join_chunks", "own_chunks"]


def own_chunks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's tokens of x [seq_len, ...], [seq_len / world_size, ...]: of 2 * world_size chunks
    the one at its rank and the one as far from the end, which is equal causal work for every rank.

    Raises: ValueError: seq_len is no multiple of 2 * world_size.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if x.shape[0] % (2 * world):
        raise ValueError(f"x has {x.shape[0]} tokens; must be a multiple of {2 * world}")
    chunks = x.chunk(2 * world)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def join_chunks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What own_chunks() took apart, [seq_len, ...] on every rank."""
    world = dist.get_world_size(group)
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous(), group=group)
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])


def context_parallel_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence whose tokens are spread over a group as own_chunks() spreads them.

    While a rank computes with the keys that it has, the next keys are on their way (NCCL, or gloo
    for CPU tensors).

    Args:
        q: [tokens, num_qo_heads, head_dim], this rank's; the same number of tokens on every rank.
        k, v: [tokens, num_kv_heads, head_dim], this rank's.
        causal, sm_scale, logits_soft_cap, backend: as in single_prefill_with_kv_cache.
        group: the ranks; by default all.

    Returns:
        out [tokens, num_qo_heads, head_dim] and LSE [tokens, num_qo_heads] (float32, base 2) of
        this rank's queries. Each merge rounds out to q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: as single_prefill_with_kv_cache does; an odd
        number of tokens.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = q.shape[0]
    if tokens % 2 or k.shape[0] != tokens:
        raise ValueError(f"q has {tokens} tokens and k {k.shape[0]}; must be equal and even")
    half = tokens // 2
    options = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "backend": backend}
    out = lse = None
    if v.shape != k.shape:
        raise ValueError(f"v is {tuple(v.shape)}; must have k's shape, {tuple(k.shape)}")
    kv = torch.stack((k, v))
    for step in range(world):
        coming, waits = (None, []) if step == world - 1 else _pass_on(kv, world, rank, group)
        owner = (rank - step) % world
        rows, keys, aligned = slice(None), slice(None), False
        if causal and step == 0:
            # Own tokens: both halves are in order, so causal by index is causal by position.
            aligned = True
        elif causal and owner < rank:
            keys = slice(0, half)  # its first chunk is before both of ours, its last behind both
        elif causal:
            rows = slice(half, None)  # our last chunk is behind both of its, our first before
        part = single_prefill_with_kv_cache_return_lse(
            q[rows], kv[0, keys], kv[1, keys], causal=aligned, **options
        )
        if out is None:
            out, lse = part
        else:
            merge_state_in_place(out[rows], lse[rows], *part)
        for wait in waits:
            wait.wait()
        kv = coming
    return out, lse


def _pass_on(
    kv: torch.Tensor, world: int, rank: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, list[dist.Work]]:
    """Starts sending keys to the next rank; the keys that come, and what to wait for."""
    coming = torch.empty_like(kv)
    ranks = [(rank + 1) % world, (rank - 1) % world]
    if group is not None:
        ranks = [dist.get_global_rank(group, one) for one in ranks]
    operations = [
        dist.P2POp(dist.isend, kv, ranks[0], group),
        dist.P2POp(dist.irecv, coming, ranks[1], group),
    ]
    return coming, dist.batch_isend_irecv(operations)
