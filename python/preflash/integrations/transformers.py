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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .._check import extras, torch_modes
from .._device import backends

try:
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
except ImportError as error:
    raise ImportError(extras.not_imported("transformers", error), name="transformers") from error

from ..prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from . import _requests
from ._requests import Requests

NAME = "preflash"
_WORKSPACE_BYTES = 128 << 20
_MOST_FORMS = 64  # maximum forms of attention in all models of a thread
_backend = "auto"


def register(backend: str = "auto") -> None:
    """Makes attn_implementation="preflash" and "paged|preflash" (the same) known to transformers.

    Calling it again with another backend concerns the models of the whole process.

    Args:
        backend: as in BatchPrefillWithPagedKVCacheWrapper.

    Raises:
        TypeError, ValueError: no such backend; what was registered before stays.
    """
    global _backend
    backends.requested(backend, with_cudnn=True)
    _backend = backend
    for name in (NAME, f"paged|{NAME}"):
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, attention_mask)
    _name_needs_no_hub()


def _name_needs_no_hub() -> None:
    """transformers looks on the hub for what has "flash" in its name, also where a model lists the
    implementations that know its sinks; this one is here and knows them."""
    adjust = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(adjust, "knows_preflash", False):
        return

    def check_and_adjust(self: PreTrainedModel, name: str | None, *args: Any, **kwargs: Any) -> Any:
        if name not in (NAME, f"paged|{NAME}"):
            return adjust(self, name, *args, **kwargs)
        calls_us = self._supports_attention_backend or self._can_set_attn_implementation()
        if not (self._supports_flash_attn and calls_us):
            raise ValueError(
                f"{type(self).__name__} takes no attn_implementation={NAME!r}: in transformers it "
                "has an attention of its own, or none with the masks of flash attention"
            )
        return NAME

    check_and_adjust.knows_preflash = True
    PreTrainedModel._check_and_adjust_attn_implementation = check_and_adjust


# Masks.


class _Bounds(NamedTuple):
    """Bounds and requests of a mask, besides its lengths."""

    causal: bool
    window: int | None = None  # tokens, the query's own among them
    requests: Requests | None = None  # None: by the numbers in the mask


class _Mask(torch.Tensor):
    """A mask that knows its bounds, also after a copy to the GPU of other layers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    bounds: _Bounds

    @classmethod
    def of(cls, tensor: torch.Tensor, bounds: _Bounds) -> _Mask:
        mask = tensor.as_subclass(cls)
        mask.bounds = bounds
        return mask

    def to(self, *args: Any, **kwargs: Any) -> _Mask:
        return self.of(super().to(*args, **kwargs), self.bounds)


@torch_modes.not_compiled("it reads the lengths of the batch on the host")
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
    """Makes the mask that attention() takes: None; or [batch, slots], the number of each slot's
    sequence and 0 for padding; or, where lengths and a causal window are not enough, bool
    [batch, 1, q_length, kv_length]."""
    if isinstance(attention_mask, _Mask):  # generate() makes masks ahead of a static cache
        return attention_mask
    config, device = kwargs.get("config"), kwargs.get("device")
    facts = _facts(mask_function)
    causal, window = facts.get("causal"), facts.get("window")
    if causal is not None and (causal or window is None):
        if "packed" in facts:  # the host reads the numbers where no cu_seq_lens come
            numbers = facts["packed"].expand(batch_size, -1) + 1
            return _Mask.of(numbers, _Bounds(causal, window))
        slots = kv_length
        if causal:  # a static cache has slots after the last query
            slots = min(slots, int(q_offset) + q_length - kv_offset)
        if attention_mask is None:
            seen = torch.ones(batch_size, slots, dtype=torch.bool, device=device)
            requests = _requests.even(batch_size, q_length, slots)
        else:
            seen = attention_mask[:, kv_offset : kv_offset + slots].bool()
            seen = torch.nn.functional.pad(seen, (0, slots - seen.shape[1]))
            requests = _requests.of_ids(seen.cpu(), q_length, causal)
        plain = window is None and requests == _requests.even(batch_size, q_length, kv_length)
        if plain and (causal or getattr(config, "is_causal", None) is not False):
            return None  # as the attention module says
        if requests is not None:
            return _Mask.of(seen, _Bounds(causal, window, requests))
    mask = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )  # fmt: skip
    return _Mask.of(mask, _Bounds(False, None, _requests.of_dense(mask, batch_size)))


def _facts(mask_function: Callable) -> dict[str, Any]:
    """causal, the window, and the numbers of packed sequences, by name, of a mask that these
    describe; else nothing."""
    if mask_function is masking_utils.causal_mask_function:
        return {"causal": True}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {"causal": False}
    if mask_function.__module__ != masking_utils.__name__:
        return {}
    name = mask_function.__qualname__.partition(".")[0]
    inside = inspect.getclosurevars(mask_function).nonlocals
    if name == "sliding_window_overlay":
        return {"window": inside["sliding_window"]}
    if name == "packed_sequence_mask_function":
        return {"packed": inside["packed_sequence_mask"]}
    if name == "remap_positions_for_packed_sequence":
        return _facts(inside["mask_function"])
    parts = [_facts(part) for part in inside["mask_functions"]] if name == "and_masks" else [{}]
    together = {key: value for part in parts for key, value in part.items()}
    return together if all(parts) and len(together) == sum(map(len, parts)) else {}


# Attention.


@torch_modes.not_compiled("it plans on the host, once for each batch")
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
        attention_mask: None, or what attention_mask() makes, or bool [batch, 1, queries, keys], or
            0 and -inf in that shape.
        sliding_window: tokens; where attention_mask() made the mask, it knows the window.
        cache: the paged cache of continuous batching.

    Returns:
        ([batch, tokens, num_qo_heads, head_dim], None). Padding rows of a causal batch are 0.
    """
    if dropout:
        raise NotImplementedError("preflash serves inference only: dropout must be 0")
    for name in ("position_bias", "output_attentions"):
        if kwargs.get(name) not in (None, False):
            raise NotImplementedError(f'{name}: attn_implementation="eager" serves it')
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "preflash plans every batch, which CUDA graphs cannot record; give "
            "ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    if cache is not None:  # writes the keys, gives those of the batch, and their cu_seq_lens_k
        states = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
        key, value = cache.update(**states, kwargs=kwargs)
        attention_mask = None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, num_qo_heads, qo_len, _ = query.shape
    if isinstance(attention_mask, _Mask):
        bounds = attention_mask.bounds
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        bounds = _Bounds(bool(causal), sliding_window)
    causal, window, requests = bounds
    qo_indptr, kv_indptr = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if qo_indptr is not None and (attention_mask is None or attention_mask.dim() == 2):
        ends = (qo_indptr, qo_indptr if kv_indptr is None else kv_indptr)
        requests = _read_once(module, ends, _requests.of_lengths, batch * qo_len)
    elif attention_mask is None:
        requests = _requests.even(batch, qo_len, key.shape[2])
    elif requests is None:
        requests = _read_once(module, (attention_mask,), _of_mask, batch, qo_len, causal)
    if requests.mask is not None:
        causal, window = False, None
    if window is not None and not causal:
        raise NotImplementedError("a window without causal needs a 4-D bool attention_mask")
    options = {
        "causal": causal,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": softcap or 0.0,
        "sm_scale": scaling,
        "q_data_type": query.dtype,
        "kv_data_type": key.dtype,
        "head_dim_vo": value.shape[-1],
    }
    q = query.transpose(1, 2).flatten(0, 1)
    sinks = None if s_aux is None else s_aux.float()
    out = _forms.run(requests, q, key, value, options, sinks)
    return out.view(batch, qo_len, num_qo_heads, -1), None


def _read_once(
    module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], read: Callable, *args: Any
) -> Requests:
    """read(*tensors, *args), which waits for the GPU, in the first layer of a forward pass. The
    last tensor keeps it for the others. Inference tensors do not count what is written to them, so
    that a layer no later than the last one begins another forward pass."""
    layer = getattr(module, "layer_idx", None)
    state = [(id(x), None if x.is_inference() else x._version) for x in tensors]
    known, _, last, requests = getattr(tensors[-1], "_preflash", (None, (), None, None))
    counted = not any(x.is_inference() for x in tensors)
    later = None not in (layer, last) and layer > last
    if known != (state, args) or not (counted or later):
        requests = read(*tensors, *args)
    tensors[-1]._preflash = ((state, args), tensors[:-1], layer, requests)
    return requests


def _of_mask(mask: torch.Tensor, batch: int, qo_len: int, causal: bool) -> Requests:
    """Requests of a mask of sequence numbers, or of one that attention_mask() did not make."""
    if mask.dim() == 2:
        requests = _requests.of_ids(mask.cpu(), qo_len, causal)
        if requests is None:
            raise NotImplementedError(
                "attention_mask has padding inside a sequence; give a 4-D bool mask"
            )
        return requests
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} dimensions; it must have 2 or 4")
    if mask.is_floating_point():
        seen = mask == 0
        if not (seen | (mask <= torch.finfo(torch.float16).min)).all():
            raise NotImplementedError("attention_mask adds a bias; only 0 and -inf are served")
        mask = seen
    return _requests.of_dense(mask.bool(), batch)


class _Forms(threading.local):
    """The wrappers of a thread: one for each form of attention on each stream."""

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
        if requests.slots > k.shape[2]:
            raise ValueError(f"attention_mask has {requests.slots} slots for {k.shape[2]} keys")
        if requests.kv_indptr is not None:
            kind, operands, table = "ragged", (k[0].transpose(0, 1), v[0].transpose(0, 1)), None
        elif requests.at_first_slot:  # a page for each
            kind, operands, table = "sequences", ((k, v),), (k.shape[2], 1)
        else:
            pages, step = _slots_as_pages(k, v)
            kind, operands, table = "slots", (pages,), (1, step)
        form = (place, heads, kind, *options.values(), requests.mask is not None)
        wrapper, *planned = self._planned.pop(form, (None,))
        if wrapper is None:
            if place not in self._workspaces:
                memory = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
                self._workspaces[place] = memory
            make = BatchPrefillWithPagedKVCacheWrapper
            if table is None:
                make = BatchPrefillWithRaggedKVCacheWrapper
            wrapper = make(self._workspaces[place], "HND" if table else "NHD", backend=_backend)
        if planned != [table, requests]:
            self.plans += 1
            sizes = heads if table is None else (*heads, table[0])
            arrays = _arrays(requests, table)
            wrapper.plan(*arrays, *sizes, **options, custom_mask=requests.mask)
        self._planned[form] = (wrapper, table, requests)
        if len(self._planned) > _MOST_FORMS:
            del self._planned[next(iter(self._planned))]
        return wrapper.run(q, *operands, sinks=sinks)


_forms = _Forms()


def _arrays(requests: Requests, table: tuple[int, int] | None) -> list[torch.Tensor]:
    """Arrays for plan(). table: the page size, and the pages from one sequence to the next; None
    without pages."""
    qo_indptr = _indptr(requests.qo_lens)
    if table is None:
        return [qo_indptr, torch.tensor(requests.kv_indptr).int()]
    page_size, step = table
    begins = [i * step + begin // page_size for i, begin, _ in requests.spans]
    lengths = torch.tensor([end - begin for _, begin, end in requests.spans])
    counts = (lengths + page_size - 1) // page_size
    indptr = _indptr(counts.tolist())
    shifts = (torch.tensor(begins) - indptr[:-1]).repeat_interleave(counts)
    last = torch.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    return [qo_indptr, indptr, (torch.arange(len(shifts)) + shifts).int(), last.int()]


def _indptr(lengths: Iterable[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _slots_as_pages(k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """k and v [batch, heads, slots, head_dim] as pages of one slot, [pages, heads, 1, head_dim],
    without a copy; and the pages from one sequence to the next."""
    if None in (_step(k), _step(v)) or _step(k) != _step(v):
        k, v = (x.new_empty(x.shape).copy_(x) for x in (k, v))  # dimensions of 1 had odd strides
    step = _step(k)
    shape = ((k.shape[0] - 1) * step + k.shape[2], k.shape[1], 1)
    return tuple(
        x.as_strided((*shape, x.shape[3]), (x.stride(2), x.stride(1), x.shape[3], 1))
        for x in (k, v)
    ), step


def _step(x: torch.Tensor) -> int | None:
    """Slots from one sequence to the next, where that is a whole number of them."""
    of_sequence, _, of_slot, of_element = x.stride()
    whole = of_slot > 0 and of_sequence % of_slot == 0 and of_element == 1
    return of_sequence // of_slot if whole else None
