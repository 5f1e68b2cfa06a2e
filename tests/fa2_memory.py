"""Shared memory of fa2's kernels, as cpp/kernels/sm80/forward_traits.cuh lays it out."""

from __future__ import annotations

import spec


def smem_bytes(variant: spec.Variant) -> int:
    """Shared memory per CTA of a kernel, in bytes; tests/codegen holds compiled kernels to it."""
    first = _of_segment(variant, variant.tile, variant.values["position"] == "alibi")
    if variant.second_tile is None:
        return first
    return max(first, _of_segment(variant, variant.second_tile, alibi=False))


def _of_segment(variant: spec.Variant, tile: spec.Tile, alibi: bool) -> int:
    qk, vo = variant.head_dim_qk, variant.head_dim_vo
    total = 2 * (tile.m * qk + tile.stages * tile.n * (qk + vo))  # Q, K, V: 16 bits
    total += tile.m * 8  # row_keys
    if alibi:
        total += tile.m * 4 + 4
    if variant.values["load"] == "converted":
        total = _aligned(total, 16) + qk // 2 * (8 + 8 + 8) + tile.m * 4
    if vo > 256:  # warps in pairs
        total = _aligned(total, 16) + 2 * tile.m * 4 + tile.m * (tile.n + 8) * 2
    total = _aligned(total, 16) + 2 * 2 * tile.n * 8  # key_offsets
    return _aligned(total, 128)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
