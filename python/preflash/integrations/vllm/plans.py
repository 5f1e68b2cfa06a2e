"""Wrappers of one attention group: one for eager steps, one for each captured shape of a step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...prefill import BatchPrefillWithRaggedKVCacheWrapper
from .._paging import StepWrapper, new_workspace, shared_workspace
from .cascade import CascadeArrays, CascadeStepWrapper
from .layers import CacheForm, LayerForm

Wrappers = dict[LayerForm, Any]


class Step(NamedTuple):
    """Index arrays of one step of the engine. Arrays of the host end in _cpu."""

    qo_indptr_cpu: torch.Tensor  # int32 [num_reqs + 1]
    kv_bounds_cpu: np.ndarray  # int32 [num_reqs], upper bounds of seq_lens
    seq_lens: torch.Tensor  # int32 [num_reqs], on the device
    block_table: torch.Tensor  # int32 [num_reqs, max_blocks], on the device
    num_tokens: int  # with padding
    causal: bool

    @property
    def key(self) -> tuple:
        """Key of a captured shape. A graph reads seq_lens and the block table at the addresses of
        its capture, so that a step with others cannot be its replay."""
        return (
            len(self.kv_bounds_cpu),
            self.num_tokens,
            self.causal,
            self.seq_lens.data_ptr(),
            self.block_table.data_ptr(),
        )


class PagedPlans:
    """Plans over a paged cache, of every form that the layers of a group have.

    Args:
        cache: the options that all forms share.
        forms: of the group's layers.
        page_size: tokens in a block of the block table.
        own_workspace: the group's launches may overlap with those of others.
        batch_invariant: as plan()'s.
    """

    def __init__(
        self,
        cache: CacheForm,
        forms: Iterable[LayerForm],
        page_size: int,
        device: torch.device,
        *,
        own_workspace: bool,
        batch_invariant: bool,
    ) -> None:
        self._batch_invariant = batch_invariant
        self._cache, self._forms = cache, tuple(forms)
        self._page_size, self._device = page_size, device
        self._own_workspace = own_workspace
        self._eager: dict[bool, Wrappers] = {}
        self._captured: dict[tuple, Wrappers] = {}
        self._cascades: dict[bool, Wrappers] = {}
        self._cascade_arrays = CascadeArrays(page_size, device)

    @property
    def can_cascade(self) -> bool:
        """False with options for which a level would have to know how many keys come after its own,
        and in batch-invariant mode, because a level is a chunk of keys."""
        return not self._batch_invariant and all(
            form.window_left < 0 and form.pos_encoding_mode == "NONE" for form in self._forms
        )

    def plan_cascade(self, step: Step, prefix_len: int) -> Wrappers:
        """Plans an eager step whose requests share their first prefix_len keys, where the prefix
        has a page and can_cascade; else plan(). Does not wait for the device."""
        prefix_pages = prefix_len // self._page_size
        if prefix_pages == 0 or not self.can_cascade:
            return self.plan(step)
        wrappers = self._cascades.get(step.causal)
        if wrappers is None:
            wrappers = self._cascades[step.causal] = {
                form: CascadeStepWrapper(self._workspace, self._options(form, step.causal))
                for form in self._forms
            }
        levels = self._cascade_arrays.levels(step, prefix_pages)
        for wrapper in wrappers.values():
            wrapper.plan_step(levels)
        return wrappers

    def plan(self, step: Step, for_capture: bool = False) -> Wrappers:
        """Plans a step once for each form. Does not wait for the device.

        for_capture: a CUDA graph will record the runs; later steps of the same key plan for its
        replay.
        """
        key = step.key
        wrappers = self._captured.get(key)
        if wrappers is None and for_capture:
            wrappers = self._captured[key] = self._graph_wrappers(step)
        if wrappers is None:
            wrappers = self._eager.get(step.causal)
        if wrappers is None:
            wrappers = self._eager[step.causal] = {
                form: StepWrapper(self._workspace, self._options(form, step.causal))
                for form in self._forms
            }
        for wrapper in wrappers.values():
            wrapper.plan_step(
                step.qo_indptr_cpu, step.kv_bounds_cpu, step.block_table, step.seq_lens
            )
        return wrappers

    def _options(self, form: LayerForm, causal: bool) -> dict[str, Any]:
        """Arguments of plan() that are the same in every step."""
        cache = self._cache
        if form.window_left >= 0 and not causal:
            raise NotImplementedError(
                "a sliding window without causal masking has two sides; preflash has windows to "
                "the left only"
            )
        return {
            "num_qo_heads": form.num_qo_heads,
            "num_kv_heads": cache.num_kv_heads,
            "head_dim_qk": cache.head_dim,
            "page_size": self._page_size,
            "causal": causal,
            "sm_scale": form.sm_scale,
            "window_left": form.window_left,
            "logits_soft_cap": form.logits_soft_cap,
            "pos_encoding_mode": form.pos_encoding_mode,
            "q_data_type": cache.kv_dtype if form.fp8_queries else cache.o_dtype,
            "kv_data_type": cache.kv_dtype,
            "o_data_type": cache.o_dtype,
            "batch_invariant": self._batch_invariant,
        }

    def _graph_wrappers(self, step: Step) -> Wrappers:
        """Wrappers for the replays of one graph, whose kernels have run once.

        The first plan of a wrapper decides how many rows later plans may have: all tokens of the
        step. Its requests have no keys, so that the run reads nothing of the cache.
        """
        rows = torch.zeros_like(step.qo_indptr_cpu)
        rows[-1] = step.num_tokens
        no_keys = np.zeros_like(step.kv_bounds_cpu)
        wrappers = {}
        for form in self._forms:
            options = self._options(form, step.causal)
            wrapper = wrappers[form] = StepWrapper(self._workspace, options, step.block_table)
            no_lens = torch.zeros_like(step.seq_lens)
            wrapper.plan_step(rows, no_keys, step.block_table, no_lens)
            self._run_once(wrapper, form, step.num_tokens)
        return wrappers

    def _run_once(self, wrapper: Any, form: LayerForm, num_tokens: int) -> None:
        """Runs a plan of requests without keys, which loads its kernels."""
        cache = self._cache
        zeros = functools.partial(torch.zeros, dtype=cache.o_dtype, device=self._device)
        q = zeros(num_tokens, form.num_qo_heads, cache.head_dim)
        q = q.to(cache.kv_dtype) if form.fp8_queries else q
        kv = zeros(2, 1, self._page_size, cache.num_kv_heads, cache.head_dim).to(cache.kv_dtype)
        wrapper.run(q, tuple(kv))

    @functools.cached_property
    def _workspace(self) -> torch.Tensor:
        make = new_workspace if self._own_workspace else shared_workspace
        return make(self._device)


class RaggedPlans:
    """Plans of encoders, whose keys are those of the step and are in no cache."""

    def __init__(
        self,
        cache: CacheForm,
        forms: Iterable[LayerForm],
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self._cache, self._forms, self._device = cache, tuple(forms), device
        self._batch_invariant = batch_invariant

    @functools.cached_property
    def _wrappers(self) -> Wrappers:
        workspace = shared_workspace(self._device)
        return {form: BatchPrefillWithRaggedKVCacheWrapper(workspace) for form in self._forms}

    def plan(self, qo_indptr_cpu: torch.Tensor) -> Wrappers:
        """Plans a step once for each form. qo_indptr_cpu: int32 [num_reqs + 1]."""
        cache = self._cache
        for form, wrapper in self._wrappers.items():
            wrapper.plan(
                qo_indptr_cpu,
                qo_indptr_cpu,
                form.num_qo_heads,
                cache.num_kv_heads,
                cache.head_dim,
                causal=False,
                sm_scale=form.sm_scale,
                logits_soft_cap=form.logits_soft_cap,
                pos_encoding_mode=form.pos_encoding_mode,
                q_data_type=cache.o_dtype,
                batch_invariant=self._batch_invariant,
            )
        return self._wrappers
