"""Wrappers of one backend: those of eager steps, and those of each captured shape of a step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from ...prefill import BatchPrefillWithRaggedKVCacheWrapper
from .._paging import StepWrapper
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
        batch_invariant: as plan()'s.
    """

    def __init__(
        self,
        forms: Iterable[LayerForm],
        page_size: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        workspace: torch.Tensor,
        *,
        batch_invariant: bool,
    ) -> None:
        self._batch_invariant = batch_invariant
        self.forms = dict.fromkeys(forms)
        self._page_size, self._workspace = page_size, workspace
        self._q_dtype, self._kv_dtype = q_dtype, kv_dtype
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
        options, masked = self._options(form), self._is_masked(form)
        if not self._for_graph:
            return StepWrapper(self._workspace, options)
        memory = step.mask_memory if masked else None
        return StepWrapper(self._workspace, options, step.keys(form.source).table, memory)

    def _is_masked(self, form: LayerForm) -> bool:
        return form.causal and self._step.mask is not None

    def _options(self, form: LayerForm) -> dict[str, Any]:
        """Arguments of plan() that are the same in every step that the form's wrapper plans."""
        return {
            "num_qo_heads": form.num_qo_heads,
            "num_kv_heads": form.num_kv_heads,
            "head_dim_qk": form.head_dim,
            "page_size": self._page_size,
            "head_dim_vo": form.v_head_dim,
            "causal": form.causal and not self._is_masked(form),
            "sm_scale": form.sm_scale,
            "window_left": form.window_left,
            "logits_soft_cap": form.logits_soft_cap,
            "q_data_type": self._q_dtype,
            "kv_data_type": self._kv_dtype,
            "batch_invariant": self._batch_invariant,
        }

    def _plan_paged(self, wrapper: StepWrapper, form: LayerForm) -> None:
        step = self._step
        keys, mask = step.keys(form.source), {}
        lengths = keys.lengths
        if self._is_masked(form):
            mask = {"custom_mask": step.mask}
            if keys.exact:  # a mask needs the numbers of keys
                lengths = None
        wrapper.plan_step(step.qo_indptr_cpu, keys.bounds_cpu, keys.table, lengths, **mask)

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
            batch_invariant=self._batch_invariant,
        )
