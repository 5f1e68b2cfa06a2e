"""libpreflash.so through ctypes: structs and functions as abi_1.txt records them."""

from __future__ import annotations

import copy
import ctypes
import re
from dataclasses import dataclass, field
from pathlib import Path

import preflash
import torch
import wrapper_options
from preflash.testing.case import MaskKind, Position
from preflash.testing.inputs import Inputs, as_nhd, pack_little, pages_of

ABI = Path(__file__).with_name("abi_1.txt").read_text()
LIBRARY = ctypes.CDLL(str(Path(preflash.__file__).parent / "lib" / "libpreflash.so"))
CPU = -1
AUTO, FA2, FA3 = 0, 2, 3
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
_, F16, BF16, E4M3, E5M2 = range(5)
POSITIONS = [Position.NONE, Position.ROPE, Position.ALIBI]
ROPE, ALIBI = 1, 2
INVALID_ARGUMENT = 1
TYPES = {
    "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double,
    "const char*": ctypes.c_char_p, "preflash_status": ctypes.c_int, "void": None,
}  # fmt: skip


def _type_of(text: str):
    return TYPES.get(text, ctypes.c_void_p)  # void*, or an address of anything


for _name in dict.fromkeys(re.findall(r"^(\w+): \w.* at ", ABI, re.M)):
    _members = re.findall(rf"^{_name}: (.+) (\w+) at ", ABI, re.M)
    _fields = [(member, _type_of(kind)) for kind, member in _members]
    TYPES[_name] = type(_name, (ctypes.Structure,), {"_fields_": _fields})
for _kind, _name, _arguments in re.findall(r"^(.+?) (preflash_\w+)\((.*)\)$", ABI, re.M):
    _function = getattr(LIBRARY, _name)
    _function.restype = _type_of(_kind)
    _kinds = [one.rpartition(" ")[0] for one in _arguments.split(", ")]
    _function.argtypes = [_type_of(kind) for kind in _kinds if kind]


class RefusedError(Exception):
    """A call that did not return PREFLASH_OK."""

    def __init__(self, status: int) -> None:
        super().__init__(LIBRARY.preflash_last_error().decode())
        self.status = status


def call(name: str, *arguments) -> None:
    if status := getattr(LIBRARY, f"preflash_{name}")(*arguments):
        raise RefusedError(status)


def made(name: str, **values) -> ctypes.Structure:
    """Makes a struct that begins with its size; other members are 0."""
    kind = TYPES[f"preflash_{name}"]
    return kind(size=ctypes.sizeof(kind), **values)


def changed(given, changes: dict):
    """Copies a struct or a Call with other values; "q.data" names a member of a member."""
    if isinstance(given, ctypes.Structure):
        other = type(given).from_buffer_copy(given)
    else:
        other = copy.copy(given)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        setattr(other, name, changed(getattr(other, name), {rest: value}) if rest else value)
    return other


def address(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def segment_of(inputs: Inputs, *, bounds: bool = False, table: bool = False):
    """Makes a preflash_segment. bounds: lengths are upper bounds, and the device has the numbers of
    keys. table: pages are a block table."""
    case, pages, stride = inputs.case, inputs.indices, 0
    if table:
        pages = wrapper_options.block_table(inputs)
        stride = pages.shape[1]
    lens = torch.tensor(case.kv_lens, dtype=torch.int32) if bounds else None
    qo_indptr, kv_indptr = inputs.qo_indptr.clone(), inputs.kv_indptr.clone()
    last = inputs.last_page_len.clone() if case.paged else None
    if bounds:
        last.fill_(case.page_size)
    dtypes = {"q_dtype": case.dtype, "kv_dtype": case.dtype_kv, "o_dtype": case.dtype_o}
    segment = made(
        "segment", num_qo_heads=case.num_qo_heads, num_kv_heads=case.num_kv_heads,
        head_dim_qk=case.head_dim, head_dim_vo=case.dim_vo,
        **{name: DTYPES.index(dtype) for name, dtype in dtypes.items()},
        causal=case.mask is MaskKind.CAUSAL, custom_mask=inputs.masks is not None,
        window_left=case.window_left, soft_cap=case.soft_cap or 0.0,
        position=POSITIONS.index(case.position), rope_scale=case.rope_scale or 1.0,
        rope_theta=case.rope_theta or 1e4, num_requests=case.batch_size,
        qo_indptr=address(qo_indptr), kv_indptr=address(kv_indptr), page_size=case.page_size,
        last_page_len=address(last), page_indices=address(pages), block_table_stride=stride,
        kv_lens=address(lens),
    )  # fmt: skip
    segment.on_host, segment.on_device = (qo_indptr, kv_indptr, last), (pages, lens)
    return segment


def tensor_of(view: torch.Tensor):
    """Makes a preflash_tensor of [token, head, head_dim] or [page, token, head, head_dim]."""
    view = view[None] if view.dim() == 3 else view
    return TYPES["preflash_tensor"](address(view), *view.stride()[:3], *view.shape[:2])


def tensors_of(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None = None):
    case, bits = inputs.case, None
    k, v = (
        pages_of(t, case) if case.paged else as_nhd(t, case.layout) for t in (inputs.k, inputs.v)
    )
    if inputs.masks is not None:  # kernels read words: 8 bytes follow
        packed = torch.cat([pack_little(mask) for mask in inputs.masks])
        bits = torch.nn.functional.pad(packed, (0, 8 + -len(packed) % 4))
    sinks = None if inputs.sinks is None else inputs.sinks.float()
    tensors = made(
        "tensors", q=tensor_of(inputs.q), k=tensor_of(k), v=tensor_of(v), out=tensor_of(out),
        lse=address(lse), lse_stride_token=case.num_qo_heads, lse_stride_head=1,
        sm_scale=case.scale, out_scale=1.0, sinks=address(sinks), mask_bits=address(bits),
    )  # fmt: skip
    tensors.memory = (inputs, out, lse, sinks, bits)
    return tensors


@dataclass
class Plan:
    handle: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)

    def __post_init__(self) -> None:
        call("plan_create", CPU, ctypes.byref(self.handle))

    def __del__(self) -> None:
        LIBRARY.preflash_plan_destroy(self.handle)


def _pointer(structs):
    return None if structs is None else ctypes.byref(structs)


@dataclass
class Call:
    """Arguments of the calls of a plan: one struct each, or arrays of two."""

    segment: ctypes.Structure | ctypes.Array | None
    tensors: ctypes.Structure | ctypes.Array | None
    num_segments: int = 1
    run_segments: int = 1
    backend: int = AUTO
    ints: int | None = None
    int_bytes: int = 0
    floats: int | None = None
    float_bytes: int = 0
    plan: Plan = field(default_factory=Plan)

    def sizes(self) -> tuple[int, int]:
        memory, given = made("memory"), (_pointer(self.segment), self.num_segments)
        call("sizes", CPU, self.backend, *given, ctypes.byref(memory))
        return memory.int_bytes, memory.float_bytes

    def allocate(self, more: int = 0) -> None:
        """Allocates memory of the sizes that the library says, and more for partial results."""
        self.int_bytes, self.float_bytes = self.sizes()
        self.float_bytes += more
        sizes = (self.int_bytes, self.float_bytes)
        self.memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.ints, self.floats = map(address, self.memory)

    def make_plan(self) -> None:
        call("plan_batch", self.plan.handle, self.backend, _pointer(self.segment),
             self.num_segments, self.ints, self.int_bytes, self.float_bytes, None)  # fmt: skip

    def run(self) -> None:
        call("run", self.plan.handle, _pointer(self.tensors), self.run_segments, self.floats,
             self.float_bytes, None)  # fmt: skip

    def planned_variant(self) -> str:
        return LIBRARY.preflash_plan_variant(self.plan.handle).decode()


def find_variant(segment, num_segments: int = 1, device: int = CPU) -> str:
    """Returns the name of the kernel that serves the options."""
    name = ctypes.c_char_p()
    call("find_variant", device, AUTO, _pointer(segment), num_segments, ctypes.byref(name))
    return name.value.decode()


def compute(segment, tensors, num_segments: int = 1) -> Call:
    """Plans and runs in new memory."""
    made = Call(segment, tensors, num_segments, num_segments)
    made.allocate()
    call("plan_set_num_threads", made.plan.handle, 2)
    made.make_plan()
    made.run()
    return made


def pair(one, other) -> ctypes.Array:
    return (type(one) * 2)(one, other)
