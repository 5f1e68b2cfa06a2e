"""Block tables, gathered on the device from SGLang's table of cache slots."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SlotTable:
    """req_to_token: the cache slot of each token of each request in SGLang's pool.

    Args:
        req_to_token: int32 [max_requests, max_tokens].
        page_size: tokens in a page of the block tables. Tokens page_size * i and the ones after
            are neighbours in the cache, as SGLang allocates them.
        to_window_pool: maps slots to those of the pool of sliding-window layers.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        to_window_pool: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.page_size = page_size
        self.max_tokens, self.device = req_to_token.shape[1], req_to_token.device
        self._slots, self._to_window_pool = req_to_token, to_window_pool
        self._columns = torch.arange(self.max_tokens, device=self.device)

    def empty_table(self, num_requests: int) -> torch.Tensor:
        """Returns a block table int32 [num_requests, pages of max_tokens] of zeros."""
        pages = -(-self.max_tokens // self.page_size)
        return torch.zeros(num_requests, pages, dtype=torch.int32, device=self.device)

    def of_requests(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Returns the slots of the first token of each page, int32 [requests, pages].

        Args:
            rows: int [requests], rows of req_to_token.
            num_tokens: columns of req_to_token to cover.
        """
        return self._slots[:, : num_tokens : self.page_size].index_select(0, rows)

    def of_suffixes(
        self, rows: torch.Tensor, begins: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Returns the slots of the tokens from begins [requests] on, int32 [requests, num_tokens].
        Needs page_size 1."""
        columns = begins[:, None] + self._columns[:num_tokens]
        return self._slots[rows[:, None], columns.clamp_(max=self.max_tokens - 1)]

    def of_branches(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        num_tokens: int,
        *,
        topk: int,
        num_steps: int,
        allocation: int,
    ) -> torch.Tensor:
        """Returns the slots of every branch of draft trees, int32 [requests * topk, num_tokens].
        Needs page_size 1.

        A branch has the tokens of its request and then num_steps of its own. SGLang places those of
        branch b at lengths + b * distance, where the distance has room for num_steps tokens, or
        with pages for the pages that they and the last page's tokens take (as in SGLang's
        generate_draft_decode_kv_indices).

        Args:
            lengths: int [requests], tokens before the drafts.
            allocation: tokens in a page of SGLang's allocator.
        """
        distance = (lengths % allocation + num_steps + allocation - 1) // allocation * allocation
        branches = distance[:, None] * self._columns[:topk]
        columns = self._columns[:num_tokens]
        own = columns >= lengths[:, None]
        columns = torch.where(own[:, None], columns + branches[..., None], columns)
        columns = columns.clamp_(max=self.max_tokens - 1)
        return self._slots[rows[:, None, None], columns].flatten(0, 1)

    def to_pages(
        self, slots: torch.Tensor, in_window_pool: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns a block table int32 [requests, pages] of slots of first tokens.

        out: int32 [requests, at least as many pages], to write to and to return.
        """
        if in_window_pool:
            slots = self._to_window_pool(slots)
        if out is None:
            if self.page_size == 1:
                return slots.int()
            return slots.floor_divide(self.page_size).int()
        torch.floor_divide(slots, self.page_size, out=out[:, : slots.shape[1]])
        return out
