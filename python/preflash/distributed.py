"""Context parallelism: attention of a batch over the GPUs of a torch.distributed group.

Every rank holds a part of the tokens. The ranks first gather all keys and values (all-gather
context parallelism: Llama 3, arXiv:2407.21783, section 3.3.2). Each rank then attends with its own
queries, in one launch per chunk, without merges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ._check import validate
from .prefill import single_prefill_with_kv_cache_return_lse

__all__ = ["context_parallel_prefill", "join_chunks", "own_chunks"]


def own_chunks(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns this rank's tokens of x [tokens, ...]: chunks rank and 2 * world_size - 1 - rank of
    each request (zig-zag sharding), so that causal work is equal on every rank.

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
    """Joins what own_chunks() took apart: [tokens, ...] on every rank. seq_lens: as there.

    Takes memory for the tokens twice: as they come, and joined.
    """
    world = dist.get_world_size(group)
    seq_lens = seq_lens or [x.shape[0] * world]
    sizes = [_own_sizes(seq_lens, world, rank) for rank in range(world)]
    own = sum(sizes[dist.get_rank(group)])
    if x.shape[0] != own:
        raise ValueError(f"x has {x.shape[0]} tokens; this rank has {own} of seq_lens={seq_lens}")
    most = max(map(sum, sizes))  # of every rank alike
    sent = x.contiguous()
    if own < most:
        sent = torch.cat((sent, sent.new_zeros(most - own, *x.shape[1:])))
    if sent.dtype.itemsize == 1:  # gloo has no type for 8-bit floats
        sent = sent.view(torch.uint8)
    parts = sent.new_empty(world, *sent.shape)
    if x.is_cuda:
        dist.all_gather_into_tensor(parts, sent, group=group)
    else:  # gloo
        dist.all_gather(list(parts), sent, group=group)
    chunks = [part[: sum(own)].split(own) for part, own in zip(parts, sizes, strict=True)]
    in_order = []
    for i in range(0, 2 * len(seq_lens), 2):
        in_order += [of_rank[i] for of_rank in chunks]
        in_order += [of_rank[i + 1] for of_rank in reversed(chunks)]
    return torch.cat(in_order).view(x.dtype)


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
    """Computes attention of requests whose tokens are spread over a group as own_chunks() spreads
    them (NCCL, or gloo for CPU tensors).

    Takes memory for K and V of all ranks, twice for one of the two while it comes.

    Args:
        q: [tokens, num_qo_heads, head_dim], this rank's.
        k, v: [tokens, num_kv_heads, head_dim], this rank's.
        seq_lens: tokens of each request on all ranks, as in own_chunks(); by default one request,
            of the same number of tokens on every rank.
        causal, sm_scale, logits_soft_cap, backend: as in single_prefill_with_kv_cache.
        group: the ranks; by default all.

    Returns:
        out [tokens, num_qo_heads, head_dim of v] and LSE [tokens, num_qo_heads] (float32, base 2)
        of this rank's queries.

    Raises:
        TypeError, ValueError, NotImplementedError: as single_prefill_with_kv_cache does; a number
        of tokens that is not this rank's.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for name, value in (("q", q), ("k", k), ("v", v)):
        validate.is_tensor(name, value)
    tokens = q.shape[0]
    if not seq_lens:
        if tokens % 2:
            raise ValueError(f"q has {tokens} tokens; must be even, or give seq_lens")
        seq_lens = [tokens * world]
    own = _own_sizes(seq_lens, world, rank)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != sum(own):
            raise ValueError(
                f"{name} has {x.shape[0]} tokens; rank {rank} of {world} has {sum(own)}"
            )
    validate.conforms("v", v, "v_like_k", known={"k_dtype": k.dtype})
    k, v = (join_chunks(x, group, seq_lens=seq_lens) for x in (k, v))
    options = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "backend": backend}
    results, row, key = [], 0, 0  # (out, LSE) of each chunk
    for length in seq_lens:
        spans = [_chunk_span(length, world, i) for i in (rank, 2 * world - 1 - rank)]
        if not causal:  # both chunks keep all keys
            spans = [(0, sum(end - begin for begin, end in spans))]
        for begin, end in spans:
            rows = slice(row, row + end - begin)
            keys = slice(key, key + (end if causal else length))
            results.append(
                single_prefill_with_kv_cache_return_lse(
                    q[rows], k[keys], v[keys], causal=causal, **options
                )
            )
            row = rows.stop
        key += length
    out, lse = zip(*results, strict=True)
    return torch.cat(out), torch.cat(lse)


def _chunk_span(length: int, world: int, i: int) -> tuple[int, int]:
    """Returns where chunk i of 2 * world begins and ends, as tensor_split() cuts a request."""
    size, longer = divmod(length, 2 * world)
    return i * size + min(i, longer), (i + 1) * size + min(i + 1, longer)


def _own_sizes(seq_lens: Sequence[int], world: int, rank: int) -> list[int]:
    """Returns the tokens of a rank's two chunks of each request, one after the other."""
    chunks = (_chunk_span(n, world, i) for n in seq_lens for i in (rank, 2 * world - 1 - rank))
    return [end - begin for begin, end in chunks]


def _chunks_of(x: torch.Tensor, seq_lens: Sequence[int], world: int, rank: int) -> torch.Tensor:
    requests = (part.tensor_split(2 * world) for part in x.split(list(seq_lens)))
    return torch.cat([chunks[i] for chunks in requests for i in (rank, -1 - rank)])
