"""A call of attention in one form, for cuDNN, the batch wrappers and the kernels that replace
cuDNN. Its arrays may be on the GPU, where only cuDNN reads them without a wait."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from .._check.arguments import GivenScales


class Starts(NamedTuple):
    """Where the requests begin in one tensor."""

    name: str  # of the argument
    given: torch.Tensor | None  # [batch_size] or [batch_size + 1]; None: the one request, at 0
    in_tokens: bool  # the unit of `given`; False: elements


class Batch(NamedTuple):
    """The requests of a call."""

    size: int
    max_qo_len: int
    max_kv_len: int
    qo_lens: torch.Tensor  # [size]
    kv_lens: torch.Tensor  # [size]
    maybe_keyless: bool  # whether some request may have no keys
    block_tables: torch.Tensor | None  # [size, pages of the longest]
    # Of q, out, k and v (None: in pages), and of the log-sum-exp (None: padded to max_qo_len).
    starts: dict[str, Starts | None]
    rows: slice = slice(0)  # of q, that requests have, where the host knows their lengths

    def arrays(self) -> dict[str, torch.Tensor]:
        """Those that say how long requests are and where they lie, by name."""
        named = {at.name: at.given for at in self.starts.values() if at is not None}
        named |= {"actual_seq_lens_q": self.qo_lens, "actual_seq_lens_kv": self.kv_lens}
        named["block_tables"] = self.block_tables
        return {name: value for name, value in named.items() if value is not None}


class Call(NamedTuple):
    """Arguments that fit together as far as shapes say."""

    q: torch.Tensor  # [tokens, num_qo_heads, head_dim_qk]
    k: torch.Tensor  # [pages, num_kv_heads, page_size, head_dim_qk], or [tokens, num_kv_heads, ...]
    v: torch.Tensor
    out: torch.Tensor | None
    lse: torch.Tensor | None  # lse_shape, or [rows, num_qo_heads] where it has starts
    batch: Batch
    workspace: torch.Tensor
    sm_scale: float
    causal: bool
    o_dtype: torch.dtype
    lse_base: str
    lse_shape: tuple[int, ...]  # of one that is made
    return_lse: bool
    scales: GivenScales = GivenScales()
    capturable: bool = False

    @property
    def with_lse(self) -> bool:
        return self.return_lse or self.lse is not None

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.q.shape[0], self.q.shape[1], self.v.shape[-1])

    def per_token(self, name: str) -> int:
        """Elements of q, out, k, v or stats from one token to the next."""
        if name == "stats":
            return self.q.shape[1]
        if name == "out" and self.out is None:
            return self.q.shape[1] * self.v.shape[-1]
        return getattr(self, name).stride(0)

    def first_tokens(self, name: str, lengths: list[int]) -> list[int]:
        """Where the requests of these lengths begin in q, out, k, v or stats. Waits for a GPU that
        holds the offsets.

        Raises ValueError where they do not lie in it, reach into the next one, or share tokens of a
        tensor that is written."""
        at, width, size = self.batch.starts[name], self.per_token(name), len(lengths)
        begins = [0] * size if at.given is None else at.given.tolist()
        if not at.in_tokens:
            for request, start in enumerate(begins[:size]):
                if start % max(width, 1):
                    raise ValueError(
                        f"{at.name}[{request}] = {start}: must be a multiple of {width}, the "
                        "elements from one token to the next; batch_offsets_units='tokens' takes "
                        "tokens"
                    )
            begins = [start // max(width, 1) for start in begins]
        if name == "stats":
            tokens = math.prod((self.lse_shape if self.lse is None else self.lse.shape)[:-1])
        else:
            tokens = (self.q if name == "out" else getattr(self, name)).shape[0]
        for request, (start, length) in enumerate(zip(begins, lengths, strict=False)):
            if length and not 0 <= start <= tokens - length:
                raise ValueError(
                    f"{at.name}[{request}]: request {request} would have the tokens [{start}, "
                    f"{start + length}); there are {tokens}"
                )
            # Requests that share their tokens begin at the same one.
            if request + 1 < len(begins) and start < begins[request + 1] < start + length:
                raise ValueError(
                    f"{at.name}[{request}]: request {request} has {length} tokens, and the next "
                    f"one begins {begins[request + 1] - start} behind it"
                )
        written = {"out": "out", "stats": "lse"}.get(name)
        if written is not None:
            used = sorted((start, n) for start, n in zip(begins, lengths, strict=False) if n)
            if any(start + n > following for (start, n), (following, _) in pairwise(used)):
                raise ValueError(f"{at.name}: requests overlap in {written}, which is written")
        return begins[:size]
