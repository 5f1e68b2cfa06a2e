"""Wrappers of one backend: those of eager steps, and those of each captured shape of a step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from ...prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from .._paging import PageArrays, graph_wrapper
from .layers import LayerForm, Source
from .steps import Step

Wrappers = dict[LayerForm, Any]


class Plans:
    """One plan a step for each form of the model's layers.

    Args:
        forms: of the layers that the model has at construction; add() adds others.
        page_size: tokens in a page of the block tables.
        q_dtype, kv_dtype: of queries and output, and of the cache.
        workspace: scratch memory of all launches.
    """

    def __init__(
        self,
        forms: Iterable[LayerForm],
        page_size: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        workspace: torch.Tensor,
    ) -> None:
        self.forms = dict.fromkeys(forms)
        self._page_size, self._workspace = page_size, workspace
        self._q_dtype, self._kv_dtype = q_dtype, kv_dtype
        self._arrays: dict[int, PageArrays] = {}
        self._eager: dict[bool, Wrappers] = {True: {}, False: {}}  # by the presence of a mask
        self._captured: dict[Hashable, Wrappers] = {}
        self._step: Step | None = None
        self.wrappers: Wrappers = {}  # those of the last step
        self._for_graph = False

    def plan(self, step: Step) -> None:
        """Plans an eager step once for each form. Does not wait for the device."""
        self._begin(step, self._eager[step.mask is not None], for_graph=False)

    def plan_for_capture(self, step: Step, shape: Hashable) -> None:
        """plan(), for runs that a CUDA graph will record. No replay has more query rows.

        Graphs of one shape, as SGLang captures with and without LoRA, share their wrappers, so that
        a replay of either runs the last plan.
        """
        self._captured.setdefault(shape, {})
        self.plan_for_replay(step, shape)

    def forget_captures(self) -> None:
        """Drops the wrappers of all graphs, which will be captured again with other memory."""
        self._captured.clear()

    def plan_for_replay(self, step: Step, shape: Hashable) -> None:
        """plan(), for the next replay of the graph that was captured with this shape."""
        self._begin(step, self._captured[shape], for_graph=True)

    def add(self, form: LayerForm) -> None:
        """Plans another form, in the last step and from now on."""
        self.forms[form] = None
        self._plan_form(form)

    def _begin(self, step: Step, wrappers: Wrappers, for_graph: bool) -> None:
        self._step, self.wrappers, self._for_graph = step, wrappers, for_graph
        for form in self.forms:
            self._plan_form(form)

    def _plan_form(self, form: LayerForm) -> None:
        wrapper = self.wrappers.get(form)
        if wrapper is None:
            wrapper = self.wrappers[form] = self._new_wrapper(form)
        if form.source is Source.NEW_TOKENS:
            self._plan_ragged(wrapper, form)
        else:
            self._plan_paged(wrapper, form)

    def _new_wrapper(self, form: LayerForm) -> Any:
        step = self._step
        if form.source is Source.NEW_TOKENS and self._for_graph:
            raise NotImplementedError("preflash's encoders run outside of CUDA graphs")
        if form.source is Source.NEW_TOKENS:
            return BatchPrefillWithRaggedKVCacheWrapper(self._workspace)
        if not self._for_graph:
            return BatchPrefillWithPagedKVCacheWrapper(self._workspace)
        memory = step.mask_memory if self._is_masked(form) else None
        return graph_wrapper(self._workspace, step.keys(form.source).table, memory)

    def _is_masked(self, form: LayerForm) -> bool:
        return form.causal and self._step.mask is not None

    # NOTE: only arrays may differ from call to call, or Python plans instead of C++.

    def _plan_paged(self, wrapper: Any, form: LayerForm) -> None:
        step = self._step
        keys, masked = step.keys(form.source), self._is_masked(form)
        # preflash splits the keys of a window, and takes a mask, where their number is known.
        bounded = not (keys.exact and (masked or form.window_left >= 0))
        pages = self._page_arrays(len(keys.bounds_cpu))
        pages.fill(keys.bounds_cpu, keys.table.shape[1], exact=not bounded)
        wrapper.plan(
            step.qo_indptr_cpu,
            pages.indptr,
            keys.table,
            pages.last_page_len,
            form.num_qo_heads,
            form.num_kv_heads,
            form.head_dim,
            self._page_size,
            head_dim_vo=form.v_head_dim,
            custom_mask=step.mask if masked else None,
            causal=form.causal and not masked,
            sm_scale=form.sm_scale,
            window_left=form.window_left,
            logits_soft_cap=form.logits_soft_cap,
            q_data_type=self._q_dtype,
            kv_data_type=self._kv_dtype,
            seq_lens=keys.lengths if bounded else None,
            lengths_are_upper_bounds=bounded,
        )

    def _plan_ragged(self, wrapper: Any, form: LayerForm) -> None:
        wrapper.plan(
            self._step.qo_indptr_cpu,
            self._step.qo_indptr_cpu,
            form.num_qo_heads,
            form.num_kv_heads,
            form.head_dim,
            head_dim_vo=form.v_head_dim,
            causal=False,
            sm_scale=form.sm_scale,
            logits_soft_cap=form.logits_soft_cap,
            q_data_type=self._q_dtype,
        )

    def _page_arrays(self, num_requests: int) -> PageArrays:
        arrays = self._arrays.get(num_requests)
        if arrays is None:
            arrays = self._arrays[num_requests] = PageArrays(num_requests, self._page_size)
        return arrays
