"""The compiled module. Addresses, streams and strides are integers; device -1 is the CPU."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, overload

__version__: str
abi_version: int

# From cpp/variants/forward.toml, by cmake/codegen/generate.py --refresh:
class DType:
    float16: DType
    bfloat16: DType
    float32: DType
    float8_e4m3fn: DType
    float8_e5m2: DType

class TileClass:
    prefill: TileClass
    decode: TileClass

class Logits:
    plain: Logits
    softcap: Logits

class Position:
    none: Position
    alibi: Position
    rope: Position

class Arrival:
    direct: Arrival
    transformed: Arrival

class Mask:
    bounds: Mask
    custom: Mask

class Segments:
    one: Segments
    two: Segments

class Sparsity:
    dense: Sparsity
    skipping: Sparsity

class Family:
    cpu: Family
    sm80: Family
    sm90: Family

class Variant:
    def __init__(
        self,
        family: Family,
        q_dtype: DType,
        kv_dtype: DType,
        head_dim_qk: int,
        head_dim_vo: int,
        tile_class: TileClass = ...,
        logits: Logits = ...,
        position: Position = ...,
        mask: Mask = ...,
        arrival: Arrival = ...,
        segments: Segments = ...,
        sparsity: Sparsity = ...,
    ) -> None: ...
    @property
    def id(self) -> str: ...
    def __hash__(self) -> int: ...

# End of what forward.toml says.

class FamilyTraits:
    @property
    def backend(self) -> str: ...
    @property
    def item_keys(self) -> int: ...
    @property
    def token_aligned(self) -> bool: ...
    @property
    def on_cpu(self) -> bool: ...
    @property
    def one_architecture(self) -> bool: ...
    def runs_on(self, compute_capability: int) -> bool: ...

def traits_of(family: Family) -> FamilyTraits: ...
def families() -> list[Family]:
    """Every family, in the order of preference."""

def families_for(compute_capability: int) -> list[Family]:
    """What backend="auto" tries on a device, best first; 0 is the CPU."""

def set_library_dir(directory: str) -> None: ...
def kernels() -> list[dict[str, Any]]:
    """Every compiled kernel that was found: id, family, backend, q_dtype, kv_dtype, head_dim_qk,
    head_dim_vo, tile_class, logits, mask, tile {m, n, stages, warps, ctas_per_sm}, smem_bytes."""

def find_id(wanted: Variant) -> str | None: ...
@overload
def find_error(wanted: Variant) -> str | None: ...
@overload
def find_error(family: Family, options: AttentionOptions) -> str | None: ...
def faster_apart(
    family: Family,
    prefill: AttentionOptions,
    prefill_batch: Batch,
    decode: AttentionOptions,
    decode_batch: Batch,
) -> bool:
    """Whether a launch for each is expected to take less time than one for both."""

def find_joint_error(
    family: Family, first: AttentionOptions, second: AttentionOptions
) -> str | None:
    """Why no kernel of the family runs both in one launch, or None."""

def device_facts(device: int) -> dict[str, Any]:
    """device, name, compute_capability, num_sms, smem_per_block, smem_per_sm, l2_bytes."""

def cuda_device_count() -> int: ...
def cuda_version() -> str: ...
def cuda_error() -> str: ...
def in_matrix(family: Family, options: AttentionOptions) -> bool: ...
def find_in_matrix(wanted: Variant) -> Variant | None:
    """What a build of every variant would run, or None."""

def cpu_isa() -> str:
    """Raises ValueError where PREFLASH_CPU_ISA names no instruction set."""

class Torch:
    """How C++ reads tensors, and what it asks and tells torch. tensor_type: torch.Tensor;
    forward_ad: the module."""

    def __init__(
        self,
        tensor_type: type,
        is_tracing: Callable[[], bool],
        is_grad_enabled: Callable[[], bool],
        forward_ad: Any,
        increment_version: Callable[[Any], None],
    ) -> None: ...

class Batch:
    def __init__(
        self,
        qo_indptr: int,
        kv_indptr: int,
        last_page_len: int,
        num_requests: int,
        page_size: int,
        are_bounds: bool = False,
    ) -> None: ...
    @property
    def are_bounds(self) -> bool: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def qo_begin(self) -> int: ...
    @property
    def kv_begin(self) -> int: ...
    @property
    def qo_end(self) -> int: ...
    @property
    def kv_end(self) -> int: ...
    @property
    def qo_indptr(self) -> list[int]: ...
    @property
    def kv_indptr(self) -> list[int]: ...
    @property
    def last_page_len(self) -> list[int]: ...
    @property
    def mask_indptr(self) -> list[int]: ...
    @property
    def max_qo_len(self) -> int: ...
    @property
    def max_kv_len(self) -> int: ...
    @property
    def mask_elements(self) -> int: ...
    @property
    def mask_bytes(self) -> int: ...
    def qo_len(self, request: int) -> int: ...
    def kv_len(self, request: int) -> int: ...
    def with_mask(self) -> Batch:
        """A copy that has a custom mask."""

    def use_mask(self) -> None: ...
    def write_mask_segments(self, begin: int) -> None: ...
    def set_page_indices(self, indices: int, count: int, uploader: Uploader | None = None) -> int:
        """Copies them, and returns the largest that a request owns; -1: none does. uploader: of
        the wrapper, whose memory takes many of them in turns."""
    def largest_page_of(self, indices: int, count: int) -> int: ...
    @property
    def page_indices(self) -> list[int]:
        """A copy of those given to set_page_indices()."""
    def first_qo_len_other_than(self, lengths: int) -> int: ...
    def first_kv_len_other_than(self, lengths: int) -> int: ...
    def first_pages_other_than(
        self, page_indices: int, block_tables: int, row_stride: int
    ) -> int: ...

def paged_batches(
    torch: Torch, tensor_type: type, int32: object
) -> Callable[[Any, Any, Any, Any, int, Uploader | None], tuple[Batch, int | None] | None]:
    """The function (qo_indptr, kv_indptr, last_page_len, page_indices, page_size, uploader) that
    makes a batch of them, as set_page_indices() does, and finds its largest page. None: the first
    three, or for the largest page the page indices, are not all contiguous one-dimensional int32
    tensors on the CPU, of numbers that fit each other."""

class Staging(enum.Enum):
    """Whether a pass of its own copies what a kernel would transform for every query tile."""

    auto = ...
    never = ...
    always = ...

class AttentionOptions:
    """Immutable and hashable: plans of one batch are remembered by their options."""

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        q_dtype: DType,
        kv_dtype: DType,
        o_dtype: DType,
        causal: bool,
        window_left: int,
        mask: Mask,
        position: Position,
        rope_scale: float,
        rope_theta: float,
        soft_cap: float,
        fixed_split_size: int,
        disable_split: bool,
        chunk_size: int = 0,
        skip_factor: float = 0.0,
    ) -> None: ...
    @property
    def num_qo_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim_qk(self) -> int: ...
    @property
    def head_dim_vo(self) -> int: ...
    @property
    def q_dtype(self) -> DType: ...
    @property
    def kv_dtype(self) -> DType: ...
    @property
    def o_dtype(self) -> DType: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window_left(self) -> int: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def position(self) -> Position: ...
    @property
    def staging(self) -> Staging: ...
    @property
    def rope_scale(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def soft_cap(self) -> float: ...
    @property
    def fixed_split_size(self) -> int: ...
    @property
    def disable_split(self) -> bool: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def skip_factor(self) -> float: ...
    def __hash__(self) -> int: ...
    def replace(self, **changes: Any) -> AttentionOptions:
        """A copy in which the named options have other values. Raises TypeError for other names."""

class RunExtras:
    """Device addresses of what few runs bring beside q, k and v; 0 is absent. per_head: of the
    tensors of preflash._arguments.PerHead, by their names."""

    def __init__(
        self,
        mask_bits: int = 0,
        mask_classes: int = 0,
        **per_head: int,
    ) -> None: ...
    @property
    def mask_bits(self) -> int: ...

class Uploader:
    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...

class Plan:
    def __init__(
        self,
        family: Family,
        device: int,
        options: AttentionOptions,
        batch: Batch,
        float_workspace_bytes: int,
        graph_max_rows: int,
        graph_mask_bytes: int = 0,
    ) -> None: ...
    @staticmethod
    def of_segments(
        family: Family,
        device: int,
        segments: Sequence[tuple[AttentionOptions, Batch, int]],
        float_workspace_bytes: int,
    ) -> Plan:
        """One launch of one or two segments: options, batch, graph_max_rows of each."""

    @property
    def num_segments(self) -> int: ...
    @property
    def id(self) -> str:
        """Of its kernels, behind "copies+" where it is staged."""
    @property
    def int_bytes(self) -> int: ...
    @property
    def float_bytes(self) -> int: ...
    @property
    def staged(self) -> bool:
        """Whether a pass before the kernel makes copies of k, v and q."""
    @property
    def num_items(self) -> int: ...
    @property
    def num_ctas(self) -> int: ...
    @property
    def num_merges(self) -> int: ...
    @property
    def mask_class_words(self) -> int:
        """Room for the classes of a custom mask's tiles; 0: the kernel does not go by them."""

    @property
    def num_kv_tiles(self) -> int: ...
    @property
    def makespan_kv_tiles(self) -> int: ...

class DevicePlan:
    """The place of a plan: `capacity` bytes of device memory at the address `memory`."""

    def __init__(self, uploader: Uploader, memory: int, capacity: int) -> None: ...
    def set_lengths(
        self,
        qo_indptr: int,
        kv_indptr: int,
        kv_lens: int,
        table_stride: int,
        qo_tokens: int,
        kv_tokens: int,
        stream: int,
    ) -> None:
        """Puts lengths that are on the device into a plan of bounds. kv_indptr: 0 where paged, with
        so many entries of a page table for each request. Rows from qo_tokens on are nobody's."""

    def page_indices(self, segment: int) -> int:
        """Where kernels find those of the plan that is here."""

    def arrive_before(self, stream: int) -> None:
        """What is launched on `stream` from now on finds the copy complete. The host does not wait,
        unless the stream is being captured into a CUDA graph, which cannot wait for what is not
        in it."""

def write_plans(
    placements: list[tuple[DevicePlan, Plan]],
    page_indices: int | Sequence[int],
    mask_bits: int,
    stream: int,
    owner: object,
    state: object,
) -> None:
    """Starts the copy of each plan to its place. page_indices: of the one segment, or of each.
    mask_bits: of the one segment, packed, where every run has the same; 0: there are none. With
    an owner, its attribute `_state` becomes `state` once all of them have been started."""

def bytes_of(torch: Torch, name: str, tensor: Any, /) -> int:
    """The bytes behind a contiguous tensor now, which its storage may have fewer of than its shape
    says. Raises ValueError where it is not contiguous."""

class HeldMemory:
    """Tensors whose memory has to stay where it is, because kernels go by its address. since,
    way_out: when it was as it has to be, and what to do where it is not, in errors."""

    def __init__(self, torch: Torch, since: str, way_out: str) -> None: ...
    @staticmethod
    def of_plan(torch: Torch, place: DevicePlan, tensor: Any) -> HeldMemory:
        """Holds the tensor in which the plan is that a place has."""

    def hold(self, name: str, tensor: Any, address: int, bytes: int) -> None:
        """Raises ValueError as check() does, where the storage has less by now."""

    def check(self) -> None:
        """Raises ValueError for the first that has less memory or other memory by now."""

class Launch:
    """q, o, lse: strides of [token, head], then of q the number of tokens and of lse the values of
    each (2: maximum and sum). k, v: strides of [page, token, head], then the numbers of pages and
    of tokens in one."""

    def __init__(
        self,
        place: DevicePlan,
        q: tuple[int, int, int],
        k: tuple[int, int, int, int, int],
        v: tuple[int, int, int, int, int],
        o: tuple[int, int],
        lse: tuple[int, int, int],
    ) -> None: ...
    @staticmethod
    def of_segments(place: DevicePlan, segments: Sequence[tuple]) -> Launch:
        """segments: (q, k, v, o, lse) of each."""

    def starter(
        self, memory: HeldMemory, num_threads: Callable[[], int] | None
    ) -> Callable[..., bool]:
        """The function (q, k, v, o, lse: int, float_workspace: Tensor | None, stream: int,
        sm_scale, out_scale, lse_scale: float, extras: RunExtras | None) that starts it; True where
        the launch was captured into a CUDA graph.

        memory: looked at before every start. num_threads: asked at every call; None: not on the
        CPU.
        """

    def run_segments(
        self,
        memory: HeldMemory,
        segments: Sequence[tuple],
        float_workspace: Any | None,
        stream: int,
        num_threads: int,
    ) -> bool:
        """segments: (q, k, v, o, lse, sm_scale, out_scale, lse_scale, extras) of each."""

# Address, (stride, count) of the dimensions before the last, bytes of a row; strides in bytes.
_Strided = tuple[int, Sequence[tuple[int, int]], int]

def may_overlap(a: _Strided, b: _Strided) -> bool:
    """Whether two tensors may have a byte in common: exact for parts of one packed tensor."""

item_record_bytes: int

class Trace:
    """Between start() and stop() every launch of the thread that called start() records its items,
    in zeroed memory of the device that outlives them."""

    def __init__(self, records: int, capacity: int, device: int) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def launches(self) -> list[tuple[str, int, int]]:
        """Kernel, first record and number of records of each."""

def repeater(
    launch: Launch,
    memory: HeldMemory,
    torch: Torch,
    num_threads: Callable[[], int] | None,
    q: Any,
    kv: Any,
    out: Any | None,
    v_offset: int,
    make_out: Callable[[Any], Any],
    partials: Any | None,
    extras: RunExtras | None,
) -> Callable[..., Any] | None:
    """The function (q, kv, out, scales, variant) that starts the launch for tensors which are like
    these in all but their addresses, and returns out; None where they are not, or would have to be
    recorded, or the stream is another one than variant's last: nothing has been done then.

    None: these tensors cannot be read, or torch has no table of functions for that (2.11 has).
    """

class MergeStatesParams:
    def __init__(
        self, dtype: DType, num_tokens: int, num_states: int, num_heads: int, head_dim: int
    ) -> None: ...
    def set_inputs(self, v_a: int, s_a: int, v_b: int, s_b: int) -> None: ...
    def set_outputs(self, v: int, s: int, token_mask: int) -> None: ...
    def launch(self, device: int, stream: int, num_threads: int) -> None: ...

class AppendParams:
    def __init__(self, num_tokens: int, num_pages: int, page_size: int) -> None: ...
    def set_k(
        self,
        rows: tuple[int, int, int],
        pool: tuple[int, int, int, int],
        num_heads: int,
        row_bytes: int,
    ) -> None: ...
    def set_v(
        self,
        rows: tuple[int, int, int],
        pool: tuple[int, int, int, int],
        num_heads: int,
        row_bytes: int,
    ) -> None: ...
    def set_places(
        self, batch_indices: tuple[int, int, int, int], positions: tuple[int, int, int, int]
    ) -> None: ...
    def set_page_table(
        self, indices: tuple[int, int, int, int], indptr: tuple[int, int, int, int]
    ) -> None: ...
    def launch(self, device: int, stream: int, num_threads: int) -> None: ...

def pack_bits(
    x: int,
    packed: int,
    segments: int,
    num_segments: int,
    little: bool,
    device: int,
    stream: int,
    num_threads: int,
) -> None: ...
