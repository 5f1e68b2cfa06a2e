"""A call of cudnn_batch_prefill_with_kv_cache: one form of it for cuDNN and for the kernels of this
package. _cudnn_checks makes it of the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from .._check.arguments import GivenScales
from .._device import backends


@dataclass(slots=True, kw_only=True)
class CudnnArguments:
    """As they were given."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float | torch.Tensor
    workspace_buffer: torch.Tensor
    max_token_per_sequence: int
    max_sequence_kv: int
    actual_seq_lens_q: torch.Tensor | None
    actual_seq_lens_kv: torch.Tensor | None
    block_tables: torch.Tensor | None
    causal: bool
    return_lse: bool
    scales: GivenScales
    batch_offsets_q: torch.Tensor | None
    batch_offsets_o: torch.Tensor | None
    batch_offsets_k: torch.Tensor | None
    batch_offsets_v: torch.Tensor | None
    batch_offsets_stats: torch.Tensor | None
    batch_offsets_units: str
    out: torch.Tensor | None
    lse: torch.Tensor | None
    is_cuda_graph_compatible: bool
    backend: str | None
    o_data_type: str | torch.dtype | None
    lse_base: str


class Offsets(NamedTuple):
    """Where the requests begin in one tensor."""

    name: str
    given: torch.Tensor | None  # [batch_size] or [batch_size + 1]; None: the one request, at 0
    per_token: int  # elements of the tensor from one token to the next
    in_tokens: bool  # the unit of `given`

    def tokens(self, batch_size: int) -> list[int]:
        """First tokens of the requests; waits for a GPU that holds the offsets."""
        if self.given is None:
            return [0] * batch_size
        starts = self.given[:batch_size].tolist()
        if self.in_tokens:
            return starts
        for request, start in enumerate(starts):
            if start % self.per_token:
                raise ValueError(
                    f"{self.name}[{request}] = {start}: must be a multiple of {self.per_token}, "
                    "the elements from one token to the next; batch_offsets_units='tokens' takes "
                    "tokens"
                )
        return [start // self.per_token for start in starts]

    def check(self, lengths: list[int], tokens: int, *, written: str | None = None) -> list[int]:
        """tokens() of requests of these lengths in a tensor of so many tokens; waits as it does.

        Raises ValueError where they do not lie in it, reach into the next one, or share tokens of a
        tensor that is written, by its name."""
        starts = self.tokens(len(lengths))
        begins = starts
        if self.given is not None and self.given.numel() > len(lengths):
            begins = [*starts, int(self.given[-1]) // (1 if self.in_tokens else self.per_token)]
        for request, length in enumerate(lengths):
            start = starts[request]
            if length and not 0 <= start <= tokens - length:
                raise ValueError(
                    f"{self.name}[{request}]: request {request} would have the tokens [{start}, "
                    f"{start + length}); there are {tokens}"
                )
            # Requests that share their tokens begin at the same one.
            if request + 1 < len(begins) and start < begins[request + 1] < start + length:
                raise ValueError(
                    f"{self.name}[{request}]: request {request} has {length} tokens, and the next "
                    f"one begins {begins[request + 1] - start} behind it"
                )
        if written is not None:
            used = sorted((start, n) for start, n in zip(starts, lengths, strict=True) if n)
            if any(start + n > following for (start, n), (following, _) in pairwise(used)):
                raise ValueError(f"{self.name}: requests overlap in {written}, which is written")
        return starts


class Call(NamedTuple):
    """A call whose arguments fit together as far as shapes say."""

    q: torch.Tensor  # [tokens, num_qo_heads, head_dim_qk]
    k: torch.Tensor  # [pages, num_kv_heads, page_size, head_dim_qk], or [tokens, num_kv_heads, ...]
    v: torch.Tensor
    sm_scale: float
    scales: GivenScales
    workspace: torch.Tensor
    batch_size: int
    max_qo_len: int
    max_kv_len: int
    qo_lens: torch.Tensor  # [batch_size]
    kv_lens: torch.Tensor  # [batch_size]
    maybe_keyless: bool  # whether some request may have no keys
    block_tables: torch.Tensor | None  # [batch_size, pages of the longest]
    causal: bool
    q_at: Offsets
    out_at: Offsets
    k_at: Offsets
    v_at: Offsets
    stats_at: Offsets | None  # None: lse is padded to max_qo_len
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    lse_base: str
    o_dtype: torch.dtype
    capturable: bool
    backend: backends.Requested

    @property
    def with_lse(self) -> bool:
        return self.return_lse or self.lse is not None

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.q.shape[0], self.q.shape[1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch_size, self.max_qo_len, self.q.shape[1])

    @property
    def stats_rows(self) -> int:
        """Of lse with batch_offsets_stats, seen as [rows, num_qo_heads]."""
        if self.lse is None:
            return self.batch_size * self.max_qo_len
        return self.lse.numel() // self.q.shape[1]

    def arrays(self) -> dict[str, torch.Tensor]:
        """Those that say how long requests are and where they lie, by name."""
        offsets = (self.q_at, self.out_at, self.k_at, self.v_at, self.stats_at)
        named = {at.name: at.given for at in offsets if at is not None}
        named |= {"actual_seq_lens_q": self.qo_lens, "actual_seq_lens_kv": self.kv_lens}
        named["block_tables"] = self.block_tables
        return {name: value for name, value in named.items() if value is not None}
