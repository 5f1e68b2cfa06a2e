"""Context parallelism: attention of a batch over the GPUs of a torch.distributed group.

Every rank holds a part of the tokens. Keys and values go round the ring of ranks, while each rank
attends with its queries to the keys that it has; the partial results merge exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ._check import values as check
from .cascade import merge_state_in_place
from .prefill import single_prefill_with_kv_cache_return_lse

__all__ = ["context_parallel_prefill", "join_chunks", "own_chunks"]


def own_chunks(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """This rank's tokens of x [tokens, ...]: of the 2 * world_size chunks of each request the one
    at its rank and the one as far from the end, which is equal causal work for every rank.

    Args:
        seq_lens: tokens of each request, of any length; by default x is one request.

    Raises: ValueError: seq_lens is not given, and a rank would have fewer tokens than another.
    """
    world = dist.get_world_size(group)
    if not seq_lens and x.shape[0] % (2 * world):
        raise ValueError(
            f"x has {x.shape[0]} tokens; must be a multiple of {2 * world}, or give seq_lens"
        )
    return _chunks_of(x, seq_lens or [x.shape[0]], world, dist.get_rank(group))


def join_chunks(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """What own_chunks() took apart, [tokens, ...] on every rank. seq_lens: as there."""
    world = dist.get_world_size(group)
    seq_lens = seq_lens or [x.shape[0] * world]
    everything = torch.arange(sum(seq_lens), device=x.device)
    rows = [_chunks_of(everything, seq_lens, world, rank) for rank in range(world)]
    sent = x.new_empty(max(map(len, rows)), *x.shape[1:])  # as much from every rank
    sent[: x.shape[0]] = x
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent, group=group)
    joined = x.new_empty(len(everything), *x.shape[1:])
    for part, of_rank in zip(parts, rows, strict=True):
        joined[of_rank] = part[: len(of_rank)]
    return joined


def context_parallel_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: Sequence[int] | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of requests whose tokens are spread over a group as own_chunks() spreads them.

    While a rank computes with the keys that it has, the next keys are on their way (NCCL, or gloo
    for CPU tensors).

    Args:
        q: [tokens, num_qo_heads, head_dim], this rank's.
        k, v: [tokens, num_kv_heads, head_dim], this rank's.
        seq_lens: tokens of each request on all ranks, as in own_chunks(); by default one request,
            of the same number of tokens on every rank.
        causal, sm_scale, logits_soft_cap, backend: as in single_prefill_with_kv_cache.
        group: the ranks; by default all.

    Returns:
        out [tokens, num_qo_heads, head_dim of v] and LSE [tokens, num_qo_heads] (float32, base 2)
        of this rank's queries. Each merge rounds out to q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: as single_prefill_with_kv_cache does; a number
        of tokens that is not this rank's.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for name, value in (("q", q), ("k", k), ("v", v)):
        check.is_tensor(name, value)
    tokens = q.shape[0]
    if not seq_lens:
        if tokens % 2:
            raise ValueError(f"q has {tokens} tokens; must be even, or give seq_lens")
        seq_lens = [tokens * world]
    # Both chunks of each request, of each rank.
    lens = [[_chunk_lens(length, world, of) for length in seq_lens] for of in range(world)]
    held = [sum(map(sum, of_rank)) for of_rank in lens]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != held[rank]:
            raise ValueError(
                f"{name} has {x.shape[0]} tokens; rank {rank} of {world} has {held[rank]}"
            )
    options = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "backend": backend}
    check.has_dtype("v", v, k.dtype, "k's")
    kv, results = (k.contiguous(), v.contiguous()), []  # (out, LSE) of each request
    for step in range(world):
        owner = (rank - step) % world  # of the keys that are here
        coming, waits = (None, []) if step == world - 1 else _pass_on(kv, held[owner - 1], group)
        try:
            row = key = 0
            for i, (own, others) in enumerate(zip(lens[rank], lens[owner], strict=True)):
                rows, keys = slice(row, row + sum(own)), slice(key, key + sum(others))
                row, key, skipped = rows.stop, keys.stop, 0
                # Own tokens are in order: causal by index is causal by position. Of an owner before
                # us the first chunk is before both of ours, the last behind; behind both of a later
                # owner's is our last chunk, before them our first.
                if causal and owner < rank:
                    keys = slice(keys.start, keys.start + others[0])
                elif causal and owner > rank:
                    skipped = own[0]
                part = single_prefill_with_kv_cache_return_lse(
                    q[rows][skipped:],
                    *(x[keys] for x in kv),
                    causal=causal and step == 0,
                    **options,
                )
                if step == 0:
                    results.append(part)
                else:
                    merge_state_in_place(*(x[skipped:] for x in results[i]), *part)
        finally:  # also of a call that is refused: the group's next call would wait for ever
            for wait in waits:
                wait.wait()
        kv = coming
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(x) for x in zip(*results, strict=True))


def _chunk_lens(length: int, world: int, rank: int) -> tuple[int, int]:
    """As tensor_split() of the request cuts them."""
    size, longer = divmod(length, 2 * world)
    return size + (rank < longer), size + (2 * world - 1 - rank < longer)


def _chunks_of(x: torch.Tensor, seq_lens: Sequence[int], world: int, rank: int) -> torch.Tensor:
    requests = (part.tensor_split(2 * world) for part in x.split(list(seq_lens)))
    return torch.cat([chunks[i] for chunks in requests for i in (rank, -1 - rank)])


def _pass_on(
    kv: tuple[torch.Tensor, torch.Tensor], tokens: int, group: dist.ProcessGroup | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[dist.Work]]:
    """Starts sending keys and values to the next rank; what comes, of so many tokens, and what to
    wait for."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    to, source = ((rank + 1) % world, (rank - 1) % world)
    if group is not None:
        to, source = (dist.get_global_rank(group, one) for one in (to, source))
    coming = tuple(x.new_empty(tokens, *x.shape[1:]) for x in kv)
    operations = [dist.P2POp(dist.isend, x, to, group) for x in kv]
    operations += [dist.P2POp(dist.irecv, x, source, group) for x in coming]
    return coming, dist.batch_isend_irecv(operations)
