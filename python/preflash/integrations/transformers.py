"""preflash as an attention of Hugging Face transformers, 5.20 and later.

    from preflash.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="preflash")

A forward pass plans once for each form of attention in the model (a model with sliding and full
layers has two forms), in its first layer of that form; the other layers only launch. The lengths of
padded and packed batches reach the host once per forward pass, when transformers makes the mask.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from ..prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from . import _requests
from ._requests import Requests

NAME = "preflash"
_WORKSPACE_BYTES = 128 << 20
_MOST_FORMS = 64  # of attention, in all models of a thread
_backend = "auto"
_memo = "_preflash_requests"  # attribute of a mask or cu_seq_lens tensor


def register(backend: str = "auto") -> None:
    """Makes attn_implementation="preflash" and "paged|preflash" (the same) known to transformers.

    Calling it again with another backend concerns the models of the whole process.

    Args:
        backend: as in BatchPrefillWithPagedKVCacheWrapper.
    """
    global _backend
    _backend = backend
    for name in (NAME, f"paged|{NAME}"):
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, attention_mask)
    _name_needs_no_hub()


def _name_needs_no_hub() -> None:
    """transformers looks on the hub for what has "flash" in its name, also where a model lists the
    implementations that know its sinks; this one is here and knows them."""
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(check, "knows_preflash", False):
        return

    def check_and_adjust(self: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> Any:
        if name not in (NAME, f"paged|{NAME}"):
            return check(self, name, *args, **kwargs)
        if not (self._supports_attention_backend or self._supports_flash_attn):
            raise ValueError(f"{type(self).__name__} has an attention of its own, not {NAME!r}")
        return NAME

    check_and_adjust.knows_preflash = True
    PreTrainedModel._check_and_adjust_attn_implementation = check_and_adjust


# Masks.


@torch.compiler.disable
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """What attention() takes as its mask: None; or [batch, slots], the number of each slot's
    sequence and 0 for padding; or, where lengths and a causal window do not say everything, bool
    [batch, 1, q_length, kv_length]."""
    causal, packed = _bounds_of(mask_function)
    if causal is None:
        mask = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
        return _remember(mask, _requests.of_dense(mask, batch_size))
    if packed is not None:
        return packed.expand(batch_size, -1) + 1  # the host reads it where no cu_seq_lens come
    slots = kv_length
    if causal:  # a static cache has slots behind the last query
        if attention_mask is not None and isinstance(q_offset, torch.Tensor):
            last = attention_mask.shape[1]  # without asking the device
        else:
            last = int(q_offset) + q_length
        slots = min(kv_length, last - kv_offset)
    if attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + slots].bool()
        on_host = mask.cpu()
        if not on_host.all():
            return _remember(mask, _requests.of_ids(on_host, q_length, causal))
    config = kwargs.get("config")
    if slots == kv_length and (causal or getattr(config, "is_causal", None) is not False):
        return None
    device = kwargs.get("device")
    mask = torch.ones(batch_size, slots, dtype=torch.bool, device=device)
    return _remember(mask, _requests.even(batch_size, q_length, slots, causal))


def _bounds_of(mask_function: Callable) -> tuple[bool | None, torch.Tensor | None]:
    """(causal, numbers of packed sequences) of a mask that lengths and a window describe, else
    (None, None). The window itself comes with every call of attention()."""
    if mask_function is masking_utils.causal_mask_function:
        return True, None
    if mask_function is masking_utils.bidirectional_mask_function:
        return False, None
    if not mask_function.__qualname__.startswith("and_masks."):
        return None, None
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    named = {part.__qualname__.partition(".")[0]: part for part in parts}
    names = set(named)
    if names == {"sliding_window_overlay", "causal_mask_function"}:
        return True, None
    packed = named.pop("packed_sequence_mask_function", None)
    if packed is not None and len(named) == 1:
        (inner,) = named.values()
        if inner.__qualname__.startswith("remap_positions_for_packed_sequence."):
            inner = inspect.getclosurevars(inner).nonlocals["mask_function"]
        causal, nested = _bounds_of(inner)
        if causal is not None and nested is None:
            numbers = inspect.getclosurevars(packed).nonlocals["packed_sequence_mask"]
            return causal, numbers
    return None, None


def _remember(tensor: torch.Tensor, requests: Requests) -> torch.Tensor:
    """The tensor, for all layers of a forward pass, with what it means to them."""
    setattr(tensor, _memo, (_version(tensor), requests))
    return tensor


def _remembered(tensor: torch.Tensor) -> Requests | None:
    version, requests = getattr(tensor, _memo, (None, None))
    return requests if version == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _of_mask(mask: torch.Tensor, batch: int, qo_len: int, causal: bool) -> Requests:
    """Of a mask that attention_mask() did not make, or that was copied since: waits for the GPU."""
    if mask.dim() == 2:
        return _requests.of_ids(mask.cpu(), qo_len, causal)
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} dimensions; it must have 2 or 4")
    if mask.is_floating_point():
        seen = mask == 0
        if not (seen | (mask <= torch.finfo(torch.float16).min)).all():
            raise NotImplementedError("attention_mask adds a bias; only 0 and -inf are served")
        mask = seen
    return _requests.of_dense(mask.bool(), batch)


# Attention.


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer, as ALL_ATTENTION_FUNCTIONS calls it.

    Args:
        query, key, value: [batch, heads, tokens, head_dim].
        attention_mask: None, or what attention_mask() makes.
        cache: the paged cache of continuous batching.

    Returns:
        ([batch, tokens, num_qo_heads, head_dim], None). Padding rows of a causal batch are 0.
    """
    if dropout:
        raise NotImplementedError("preflash serves inference only: dropout must be 0")
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("preflash serves no position_bias")
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "preflash plans every batch, which CUDA graphs cannot record; give "
            "ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    if cache is not None:  # writes the keys, gives those of the batch, and their cu_seq_lens_k
        states = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
        key, value = cache.update(**states, kwargs=kwargs)
        attention_mask = None
    batch, num_qo_heads, qo_len, _ = query.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    requests = _find(attention_mask, batch, qo_len, key.shape[2], causal, kwargs)
    if requests.causal is not None:
        causal = requests.causal
    windowed = sliding_window is not None and requests.mask is None
    if windowed and not causal:
        raise NotImplementedError("a window without causal needs a 4-D bool attention_mask")
    options = {
        "causal": causal,
        "window_left": sliding_window - 1 if windowed else -1,
        "logits_soft_cap": softcap or 0.0,
        "sm_scale": scaling,
        "q_data_type": query.dtype,
        "kv_data_type": key.dtype,
        "head_dim_vo": value.shape[-1],
    }
    q = query.transpose(1, 2).flatten(0, 1)
    sinks = None if s_aux is None else s_aux.float()
    out = _forms().run(requests, q, key, value, options, sinks)
    return out.view(batch, qo_len, num_qo_heads, -1), None


def _find(
    mask: torch.Tensor | None, batch: int, qo_len: int, kv_len: int, causal: bool, kwargs: dict
) -> Requests:
    """The requests of a forward pass; its first layer looks at tensors, the others remember."""
    qo_indptr, kv_indptr = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if qo_indptr is not None and (mask is None or mask.dim() == 2):
        kv_indptr = qo_indptr if kv_indptr is None else kv_indptr
        requests = _remembered(kv_indptr)
        if requests is None or sum(requests.qo_lens) != batch * qo_len:
            both = torch.stack((qo_indptr, kv_indptr)).tolist()
            requests = _requests.of_lengths(*both, rows=batch * qo_len)
            _remember(kv_indptr, requests)
        return requests
    if mask is None:
        return _requests.even(batch, qo_len, kv_len)
    requests = _remembered(mask)
    if requests is None:
        requests = _of_mask(mask, batch, qo_len, causal)
        _remember(mask, requests)
    return requests


class _Forms:
    """The wrappers of one thread: one for each form of attention on each stream."""

    def __init__(self) -> None:
        self._workspaces: dict[Any, torch.Tensor] = {}
        self._planned: dict[Any, tuple[Any, Any, Requests]] = {}
        self.plans = 0

    def run(
        self,
        requests: Requests,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: dict[str, Any],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [rows, heads, head_dim]; k and v: [batch, heads, slots, head_dim]."""
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        place = (q.device, stream, _backend)
        heads = (q.shape[1], k.shape[1], q.shape[2])
        if requests.kv_indptr is not None:
            operands = (k[0].transpose(0, 1), v[0].transpose(0, 1))
            table: tuple = ("ragged",)
        elif requests.at_first_slot:
            operands, table = ((k, v),), ("page", k.shape[2])
        else:
            pages, first = _slots_as_pages(k, v)
            operands, table = (pages,), ("slot", first)
        form = (place, heads, table[0], *options.values(), requests.mask is not None)
        wrapper, planned_table, planned = self._planned.get(form, (None, None, None))
        if wrapper is None or planned_table != table or not requests.same(planned):
            if wrapper is None:
                wrapper = self._wrapper(place, table[0])
            self._plan(wrapper, requests, table, heads, options)
            self._planned.pop(form, None)
            self._planned[form] = (wrapper, table, requests)
            if len(self._planned) > _MOST_FORMS:
                del self._planned[next(iter(self._planned))]
        return wrapper.run(q, *operands, sinks=sinks)

    def _wrapper(self, place: Any, kind: str) -> Any:
        if place not in self._workspaces:
            memory = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=place[0])
            self._workspaces[place] = memory
        memory = self._workspaces[place]
        if kind == "ragged":
            return BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD", backend=_backend)
        return BatchPrefillWithPagedKVCacheWrapper(memory, "HND", backend=_backend)

    def _plan(
        self,
        wrapper: Any,
        requests: Requests,
        table: tuple,
        heads: tuple[int, int, int],
        options: dict[str, Any],
    ) -> None:
        self.plans += 1
        qo_indptr = _indptr(requests.qo_lens)
        options = {**options, "custom_mask": requests.mask}
        if table[0] == "ragged":
            kv_indptr = torch.tensor(requests.kv_indptr, dtype=torch.int32)
            wrapper.plan(qo_indptr, kv_indptr, *heads, **options)
            return
        kind, size = table
        if kind == "page":  # a sequence each
            ranges = [(i, i + (end > 0)) for i, _, end in requests.spans]
        else:
            ranges = [(i * size + b, i * size + e) for i, b, e in requests.spans]
        indices = torch.cat([torch.arange(*one) for one in ranges]).int()
        pages = (_indptr([end - begin for begin, end in ranges]), indices)
        page_size = size if kind == "page" else 1
        lengths = [end - begin for _, begin, end in requests.spans]
        last = torch.tensor([min(n, page_size) for n in lengths]).int()
        wrapper.plan(qo_indptr, *pages, last, *heads, page_size, **options)


def _indptr(lengths: Any) -> torch.Tensor:
    sums = torch.tensor([0, *lengths]).cumsum(0)
    return sums.int()


def _slots_as_pages(
    k: torch.Tensor, v: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """k and v [batch, heads, slots, head_dim] as pages of one slot, [pages, heads, 1, head_dim],
    without a copy; and the pages from one sequence to the next."""
    if _step(k) != _step(v) or _step(k) is None:
        k, v = (x.contiguous(memory_format=torch.contiguous_format) for x in (k, v))
        if _step(k) is None or _step(k) != _step(v):  # dimensions of 1 keep odd strides
            k, v = (x.new_empty(x.shape).copy_(x) for x in (k, v))
    step = _step(k)
    pages = []
    for x in (k, v):
        batch, heads, slots, head_dim = x.shape
        count = (batch - 1) * step + slots
        strides = (x.stride(2), x.stride(1), head_dim, 1)
        pages.append(x.as_strided((count, heads, 1, head_dim), strides))
    return (pages[0], pages[1]), step


def _step(x: torch.Tensor) -> int | None:
    """Slots from one sequence to the next, where that is a whole number of them."""
    of_sequence, _, of_slot, of_element = x.stride()
    whole = of_slot > 0 and of_sequence % of_slot == 0 and of_element == 1
    return of_sequence // of_slot if whole else None


_of_thread = threading.local()


def _forms() -> _Forms:
    if not hasattr(_of_thread, "forms"):
        _of_thread.forms = _Forms()
    return _of_thread.forms
