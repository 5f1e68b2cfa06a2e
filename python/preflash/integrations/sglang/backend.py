"""SGLang's attention on preflash's kernels."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_spec

from .._paging import new_workspace, shared_workspace
from .layers import FP8_DTYPES, attention_layers, layer_form
from .limits import check_layer, check_runner, verifies_trees
from .plans import Plans
from .steps import GraphMemory, Step, StepMaker
from .tables import SlotTable


class PreflashAttnBackend(AttentionBackend):
    """Paged attention over SGLang's cache, planned from the lengths that SGLang has on the host.

    The work list of a step is for SGLang's lengths on the host; kernels read the lengths and the
    block table on the device. A step writes its keys to the cache before it reads them, so that
    prefill, chunked prefill, a cached prefix and decode are one launch each, in any mix.

    Args:
        model_runner: SGLang's ModelRunner, with its model.
        page_size: tokens in a page of the block tables; that of SGLang's allocator by default.

    Raises:
        NotImplementedError: a model or an option that preflash does not serve, with the reason.
    """

    def __init__(self, model_runner: Any, page_size: int | None = None) -> None:
        super().__init__()
        check_runner(model_runner)
        config, pool = model_runner.model_config, model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.max_context_len = config.context_len
        self.token_to_kv_pool, self.req_to_token_pool = pool, model_runner.req_to_token_pool
        # Slots of a request's text follow those of its encoder tokens, and begin inside a page.
        page_size = model_runner.page_size if page_size is None else page_size
        self._page_size = 1 if config.is_encoder_decoder else page_size
        self._to_window_pool = getattr(pool, "translate_loc_from_full_to_swa", None)
        self.slots = SlotTable(
            self.req_to_token_pool.req_to_token, self._page_size, self._to_window_pool
        )
        device = self.slots.device
        self.plans = Plans(
            (self._form(layer) for layer in attention_layers(model_runner.model)),
            self._page_size,
            model_runner.dtype,
            model_runner.kv_cache_dtype,
            # Launches of a second backend may overlap with those of the first one.
            (new_workspace if model_runner.init_new_workspace else shared_workspace)(device),
            batch_invariant=get_exec().deterministic.enable_deterministic_inference,
        )
        self._checked_layers = set(attention_layers(model_runner.model))  # by check_runner()
        self._make_step = StepMaker(self.slots, config.is_encoder_decoder)
        # A 16-bit cache has the keys and values as they are, whatever scales a model has loaded.
        self._reads_scales = model_runner.kv_cache_dtype in FP8_DTYPES
        self._layers = list(attention_layers(model_runner.model)) if self._reads_scales else []
        self._captured_scales: list[tuple] = []
        self._is_draft = model_runner.is_draft_worker
        self._with_trees = verifies_trees(model_runner) and not self._is_draft
        self._memory: GraphMemory | None = None
        self._verify_mask: VerifyMask | None = None
        self._window_locs: torch.Tensor | None = None

    # Plans.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans an eager step."""
        self.init_forward_metadata_in_graph(forward_batch)
        if not forward_batch.forward_mode.is_idle():
            self.plans.plan(self._step(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what graphs of up to max_bs requests and max_num_tokens query rows read."""
        mask_rows = max_num_tokens // max_bs if self._with_trees else 0
        self._memory = GraphMemory(self.slots, max_bs, mask_rows)
        self.plans.forget_captures()
        if not self._with_trees:  # chains are verified with causal masking, which reads no mask
            self._verify_mask = maybe_create_verify_mask(
                is_draft_runner=self._is_draft,
                skip_prefill=False,
                max_bs=max_bs,
                max_context_len=self.max_context_len,
                num_draft_tokens=get_spec().speculative_num_draft_tokens,
                device=self.slots.device,
                is_read=False,
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans a step that a CUDA graph captures or replays.

        Raises:
            NotImplementedError: a step of prefills.
            RuntimeError: as check_scales().
        """
        self.check_scales(in_capture)
        mode = forward_batch.forward_mode
        uniform = mode.is_target_verify() or mode.is_draft_extend_v2()
        if not (mode.is_decode_or_idle() or uniform):
            raise NotImplementedError(
                "preflash plans CUDA graphs of decode, verify and draft-extend steps in SGLang; "
                "the attention of a prefill runs between graphs"
            )
        step = self._step(forward_batch, self._memory)
        shape = (mode, forward_batch.batch_size)
        plan = self.plans.plan_for_capture if in_capture else self.plans.plan_for_replay
        plan(step, shape)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Begins a forward pass, whose first layer with a sliding window maps its cache slots."""
        self._window_locs = None

    def check_scales(self, in_capture: bool) -> None:
        """Raises RuntimeError if the scales of an fp8 cache are not those of the captured launches,
        which an update of the weights does not reach."""
        scales = [(layer.k_scale_float, layer.v_scale_float) for layer in self._layers]
        if in_capture:
            self._captured_scales = scales
        elif scales != self._captured_scales:
            raise RuntimeError(
                "weights were updated, and the scales of k and v are not those that CUDA graphs "
                "were captured with: start again, or use --disable-cuda-graph"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Memory for the masks of chains, which nothing reads; None: SGLang allocates masks."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Raises NotImplementedError where the plan has the mask of an unfinished draft."""
        if self._with_trees:
            raise NotImplementedError(
                "preflash plans with the mask of a draft tree: unset "
                "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
            )

    def _step(self, forward_batch: Any, memory: GraphMemory | None = None) -> Step:
        is_tree = self._with_trees and forward_batch.forward_mode.is_target_verify()
        return self._make_step(forward_batch, is_tree, memory)

    # Layers.

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes a layer of prefills or of a speculative step, as forward_decode()."""
        return self.forward_decode(*args, **kwargs)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes a layer for the step that was planned last.

        Args:
            q: [num_tokens, num_heads * head_dim]; rows of padding are not read.
            k, v: [num_tokens, num_kv_heads, head_dim], to write into the cache; None: the cache has
                them already.
            layer: RadixAttention.
            save_kv_cache: False: k and v are in the cache already.
            sinks: [num_heads], logits of the attention sink.

        Returns:
            [num_tokens, num_heads * v_head_dim]; rows of padding are 0.
        """
        form = self._form(layer)
        if layer not in self._checked_layers:  # no module of the model
            check_layer(layer, self.kv_cache_dtype, self._with_trees)
            self._checked_layers.add(layer)
        if form not in self.plans.forms:
            self.plans.add(form)
        wrapper = self.plans.wrappers[form]
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        sinks = None if sinks is None else sinks.float()  # the dtype that run() takes
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            k = k.view(-1, layer.tp_k_head_num, layer.head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            return wrapper.run(q, k, v, sinks=sinks).flatten(1)
        if k is not None and save_kv_cache:
            self._write(layer, forward_batch, k, v)
        out = wrapper.run(
            q,
            self._key_and_value(layer),
            k_scale=layer.k_scale_float if self._reads_scales else None,
            v_scale=layer.v_scale_float if self._reads_scales else None,
            sinks=sinks,
        )
        return out.flatten(1)

    def _form(self, layer: Any) -> Any:
        return layer_form(layer, self._to_window_pool is not None)

    def _key_and_value(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Returns k and v [pages, page_size, num_kv_heads, head_dim] of the cache."""
        pair = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return tuple(t.view(-1, self._page_size, *t.shape[1:]) for t in pair)

    def _write(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the new tokens' keys and values into the cache."""
        window_locs = None
        if self._to_window_pool is not None and layer.sliding_window_size >= 0:
            if self._window_locs is None:
                self._window_locs = self._to_window_pool(forward_batch.out_cache_loc)
            window_locs = self._window_locs
        locs = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=window_locs)
        self.token_to_kv_pool.set_kv_buffer(layer, locs, k, v, layer.k_scale, layer.v_scale)
