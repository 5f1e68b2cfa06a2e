"""The compiled module. Addresses, streams and strides are integers; device -1 is the CPU."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, overload

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
    compact: TileClass

class Logits:
    plain: Logits
    softcap: Logits

class Position:
    none: Position
    alibi: Position
    rope: Position

class Load:
    direct: Load
    converted: Load

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
        load: Load = ...,
        segments: Segments = ...,
        sparsity: Sparsity = ...,
    ) -> None: ...
    @property
    def id(self) -> str: ...
    def __hash__(self) -> int: ...

# End of what forward.toml says.

class FamilyTraits:
    backend: Final[str]
    item_keys: Final[int]
    token_aligned: Final[bool]
    on_cpu: Final[bool]
    one_architecture: Final[bool]
    def runs_on(self, compute_capability: int) -> bool: ...

def traits_of(family: Family) -> FamilyTraits: ...
def families() -> list[Family]:
    """Every family, in the order of preference."""

def families_for(compute_capability: int) -> list[Family]:
    """What backend="auto" tries on a device, best first; 0 is the CPU."""

def compiled_for(architectures: str, compute_capability: int) -> bool:
    """Whether a GPU runs a library that was compiled for these architectures, as in "80;90+PTX"."""

def architectures(family: Family) -> str:
    """What the family's kernels were compiled for; empty where none are here."""

def set_library_dir(directory: str) -> None: ...
def kernels() -> list[dict[str, Any]]:
    """Every compiled kernel that was found: id, family, backend, q_dtype, kv_dtype, head_dim_qk,
    head_dim_vo, tile_class, logits, mask, tile {m, n, stages, warps, ctas_per_sm}, smem_bytes."""

def find_id(wanted: Variant) -> str | None: ...
@overload
def find_error(wanted: Variant) -> str | None:
    """Why no compiled kernel covers the variant; None if one does. Values of options, such as a
    head_dim of 12, are checked by plan() alone."""

@overload
def find_error(family: Family, options: AttentionOptions) -> str | None: ...
def prefer_two_launches(
    family: Family,
    prefill: tuple[AttentionOptions, Batch],
    decode: tuple[AttentionOptions, Batch],
) -> bool:
    """True if a launch for each is expected to take less time than one for both."""

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
    autograd: the module torch.autograd."""

    def __init__(
        self,
        tensor_type: type,
        is_tracing: Callable[[], bool],
        is_grad_enabled: Callable[[], bool],
        autograd: Any,
    ) -> None: ...

class BatchArrays:
    """int32 arrays on the host, by address. last_page_len: 0 if ragged."""

    def __init__(
        self, qo_indptr: int, kv_indptr: int, last_page_len: int, num_requests: int
    ) -> None: ...

class Batch:
    def __init__(
        self, arrays: BatchArrays, page_size: int, lengths_are_upper_bounds: bool = False
    ) -> None: ...
    lengths_are_upper_bounds: Final[bool]
    exact_rows: Final[bool]
    kv_lengths_are_upper_bounds: Final[bool]
    num_requests: Final[int]
    page_size: Final[int]
    qo_begin: Final[int]
    kv_begin: Final[int]
    qo_end: Final[int]
    kv_end: Final[int]
    qo_indptr: Final[list[int]]
    kv_indptr: Final[list[int]]
    last_page_len: Final[list[int]]
    mask_indptr: Final[list[int]]
    max_qo_len: Final[int]
    max_kv_len: Final[int]
    mask_elements: Final[int]
    mask_bytes: Final[int]
    def qo_len(self, request: int) -> int: ...
    def kv_len(self, request: int) -> int: ...
    def with_mask(self) -> Batch:
        """A copy that has a custom mask."""

    def use_mask(self) -> None: ...
    page_entries: Final[int]
    def use_block_table(self, row_stride: int) -> None:
        """Makes request i's pages begin at i * row_stride in the page indices."""

    def use_kv_upper_bounds(self) -> None:
        """Makes the lengths of keys upper bounds of those that a run brings."""

    def may_leave_rows(self, q_rows: int) -> bool:
        """True if a q of so many rows may have rows of no request."""

    def require_exact_rows(self) -> None:
        """Makes runs refuse a q with more rows than the requests have."""

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

def debugging() -> bool:
    """True under PREFLASH_DEBUG=1, which also checks values on the GPU, with a wait for it."""

def page_lengths_of(torch: Torch) -> Callable[[Any, Any, int], list[int] | None]:
    """The function (kv_indptr, last_page_len, page_size) that tells the lengths of requests. None:
    not both are contiguous one-dimensional int32 tensors on the CPU, or a value is wrong."""

class Prepass(enum.Enum):
    """Whether a pass of its own copies what a kernel would convert for every query tile."""

    auto = ...
    never = ...
    always = ...

class AttentionOptions:
    """Immutable and hashable: plans of one batch are remembered by their options."""

    # From cpp/variants/options.toml, by cmake/codegen/generate.py --refresh:
    def __init__(
        self,
        *,
        num_qo_heads: int = ...,
        num_kv_heads: int = ...,
        head_dim_qk: int = ...,
        head_dim_vo: int = ...,
        q_dtype: DType = ...,
        kv_dtype: DType = ...,
        o_dtype: DType = ...,
        causal: bool = ...,
        quantizes_q: bool = ...,
        window_left: int = ...,
        chunk_size: int = ...,
        mask: Mask = ...,
        position: Position = ...,
        prepass: Prepass = ...,
        rope_scale: float = ...,
        rope_theta: float = ...,
        soft_cap: float = ...,
        fixed_split_size: int = ...,
        disable_split: bool = ...,
        one_pass: bool = ...,
        skip_factor: float = ...,
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
    def quantizes_q(self) -> bool: ...
    @property
    def window_left(self) -> int: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def position(self) -> Position: ...
    @property
    def prepass(self) -> Prepass: ...
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
    def one_pass(self) -> bool: ...
    @property
    def skip_factor(self) -> float: ...
    # End of what options.toml says.
    def __hash__(self) -> int: ...
    def replace(self, **changes: Any) -> AttentionOptions:
        """A copy in which the named options have other values. Raises TypeError for other names."""

class Uploader:
    def __init__(self, device: int) -> None: ...
    device: Final[int]

class Plan:
    num_segments: Final[int]
    @property
    def id(self) -> str:
        """Of its kernels, behind "prepass+" where it has a pre-pass."""
    int_bytes: Final[int]
    float_bytes: Final[int]
    @property
    def has_prepass(self) -> bool:
        """Whether a pass before the kernel makes copies of k, v and q."""
    num_rounds: Final[int]
    """Launches, one after the other over the same float workspace."""
    num_items: Final[int]
    num_ctas: Final[int]
    num_merges: Final[int]
    @property
    def mask_tile_words(self) -> int:
        """For the empty, full and partial tiles of a custom mask; 0: the kernel reads its bits."""

    num_kv_tiles: Final[int]
    makespan_kv_tiles: Final[int]

def plan(
    family: Family,
    device: int,
    segments: Sequence[tuple[AttentionOptions, Batch, int, int]],
    float_workspace_bytes: int,
    /,
) -> Plan:
    """The plan of one launch. segments: one or two, each (options, batch, graph_max_rows,
    graph_mask_bytes)."""

class RequestLengths:
    """Lengths of a batch on the device, by address. kv_indptr: 0 where paged, with table_stride
    entries of a page table for each request."""

    def __init__(self, qo_indptr: int, kv_indptr: int, kv_lens: int, table_stride: int) -> None: ...

class PlanBuffer:
    """Memory for a work list, where one plan at a time is."""

    buffer: Final[Any]
    # Whether anybody else may still run what is here: a CUDA graph that captured it, a copied
    # wrapper.
    shared: bool
    @property
    def is_captured(self) -> bool:
        """True if a CUDA graph has captured a run."""

    def check_captured(self, segment: int, batch: Batch, largest_page: int) -> None:
        """Raises ValueError if graphs could not go on with a batch in this segment: tensors that
        they hold have other memory, or are too small. largest_page: -1 if not known."""

    def set_lengths(
        self, lengths: RequestLengths, qo_tokens: int, kv_tokens: int, stream: int
    ) -> None:
        """Replaces the lengths of a plan of bounds by those of the device. qo_tokens: rows of q;
        kv_tokens: of k and v, or of the pages of one row of the table."""

    def arrive_before(self, stream: int) -> None:
        """What is launched on `stream` from now on finds the copy complete. The host does not wait,
        unless the stream is being captured into a CUDA graph, which cannot wait for what is not
        in it."""

class PinnedAddresses:
    """Tensors whose memory has to stay where it is, because kernels go by its address. since,
    way_out: when it was as it has to be, and what to do where it is not, in errors."""

    def __init__(self, torch: Torch, since: str, way_out: str) -> None: ...
    def hold(self, name: str, tensor: Any, address: int, bytes: int) -> None:
        """Raises ValueError as check() does, where the storage has less by now."""

    def check(self) -> None:
        """Raises ValueError for the first that has less memory or other memory by now."""

class RunMemory:
    """What a launch uses beside the work list and the tensors of a segment. partials: the float
    workspace. skip_factor: instead of that of a plan with one; 0: the plan's. tensors: mask_bits,
    mask_tiles, kv_lens and those of preflash._check.arguments.PerHead, by name; None is absent."""

    def __init__(
        self,
        torch: Torch,
        partials: Any | None,
        skip_factor: float = ...,
        **tensors: Any | None,
    ) -> None: ...

class RunFunctions:
    """Functions of Python for the rare paths of plan() and run().

    check: (requests, arguments of the run) -> for each segment the strides and extents of (q, k, v,
        out, lse), where V begins in bytes, and the functions that make out and lse of q. Raises all
        that is wrong with the tensors. Strides are of [token, head], of q with the number of
        tokens, of lse with the values of each (2: maximum and sum); of k and v of [page, token,
        head], with the numbers of pages and of tokens in one.
    refuse: (requests, arguments of the run); raises where a gradient or a trace would miss the run.
    convert: (q, request) -> q in the dtype that kernels read, where Request.q_given is another.
    copy: (buffer, array, most), of upload(), where the array is not contiguous and one-dimensional
        on the host.
    to_host: (arrays) -> copies of int32 arrays on the host, which waits for them.
    """

    def __init__(
        self,
        torch: Torch,
        *,
        check: Callable[..., Sequence[tuple]],
        refuse: Callable[..., None],
        convert: Callable[[Any, Any], Any],
        copy: Callable[[Any, Any, int], None],
        to_host: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None: ...

class Buffer:
    """A tensor that launches use besides the caller's, and the streams that use it."""

    tensor: Final[Any]
    num_bytes: Final[int]

class Workspace:
    """Memory for the plans of one wrapper.

    device_stream: a DeviceStream. float_buffer, int_buffer: tensors or None. Without a float buffer
    plans may use `float_bytes` of one that every run brings; without an int buffer the workspace
    allocates its own."""

    def __init__(
        self,
        functions: RunFunctions,
        device_stream: Any,
        float_buffer: Any | None = None,
        int_buffer: Any | None = None,
    ) -> None: ...
    device_stream: Final[Any]
    float_tensor: Final[Any | None]
    float_bytes: int
    @property
    def int_room(self) -> int | None:
        """Bytes of the caller's int buffer; None without one."""
    @property
    def known_uploader(self) -> Uploader | None:
        """None before the first plan."""
    def beside(self) -> Workspace:
        """For other variants of a plan: the same float buffer, and int buffers of its own."""
    def allocate(self, num_bytes: int) -> Buffer: ...
    def plan_buffer(self, buffer: Buffer) -> PlanBuffer:
        """Place of one work list at a time in `buffer`, which nothing else uses."""
    def give_back(self, variant: ExecutionPlan) -> None:
        """Takes back the memory of a variant that no later run uses. A run may be under way, for
        which the memory is kept."""

class ExecutionPlan:
    """A batch, or two in one launch, each a segment with its own tensors, page table, mask and
    options: the kernel, the work list and, once allocated and uploaded, the launches.

    backend: a Backend. requests: a Request for each segment. plan_buffer: None before
    allocate_in()."""

    def __init__(self, backend: Any, plan: Plan, requests: tuple[Any, ...]) -> None: ...
    backend: Final[Any]
    plan: Final[Plan]
    id: Final[str]
    requests: tuple[Any, ...]
    @property
    def request(self) -> Any:
        """Request of the first segment."""
    workspace: Final[Workspace]
    device_stream: Final[Any]
    plan_buffer: Final[PlanBuffer]
    shared: bool
    """True if another owner may still run it: a CUDA graph, or a copied wrapper."""
    before_run: Callable[[], None] | None
    """Called before every run."""
    def allocate_in(self, workspace: Workspace, where: PlanBuffer | None = None) -> None:
        """Binds the plan to memory for its work list: to `where`, which a CUDA graph
        captured, or to new memory of the workspace."""
    def __call__(self, *arguments: Any) -> Any:
        """Starts a launch and returns the result, or that of each segment.

        arguments: (q, kv, scales, outputs, memory) of each segment. kv: a cache that holds both, or
            a pair. scales: of the logits and of the output. outputs: out or None, lse or None,
            return_lse, lse_base, lse_layout. memory: a RunMemory, or the per-head tensors, of this
            run alone; None: the plan's."""
    def check_run(self, *arguments: Any) -> None:
        """The checks of a run alone."""

def order_behind_users(
    ran: Sequence[ExecutionPlan], captured: Sequence[PlanBuffer], workspace: Workspace
) -> None:
    """Orders the current stream after all earlier uses of the memory of variants and places, but
    for those on streams that are being captured."""

def upload(
    variants: Sequence[ExecutionPlan],
    stream: int,
    copies: Sequence[tuple[Any, Any, int]],
    then: Callable[[], object] | None,
    /,
) -> None:
    """Starts the copies of the variants' work lists to the device, and `copies` of int32 arrays:
    the buffer on the device, the array, of which those on the host are read before this returns,
    and the most elements. then: called once all have been started; no signal handler runs before
    it where it runs no bytecode."""

class RepeatedPlan:
    """The last plan() of a wrapper, for one that differs in index arrays alone.

    call: the function of that plan(). roles: (name, position or -1, role) of its index arrays, the
    role one of qo_indptr, kv_indptr, on_host (kv_indptr again), indices, last_page_len, kv_lens.
    plan, graph: the wrapper's _wrappers.plan.Plan, and its GraphMode or None."""

    def __init__(
        self, call: object, roles: Sequence[tuple[str, int, str]], plan: Any, graph: Any | None
    ) -> None: ...
    def remember(self, by_position: tuple, by_name: dict[str, Any]) -> bool:
        """Keeps the constants that the next call is compared with. False: an argument besides the
        index arrays is no constant, so that no call will be the same."""

class RememberedCalls:
    """What was made of the constants among the arguments of earlier calls; the last 16."""

    def __init__(self) -> None: ...
    def find(self, call: object, by_position: tuple, by_name: dict[str, Any]) -> Any | None:
        """None: no earlier call had these arguments, or one of them is no constant."""
    def keep(
        self,
        call: object,
        by_position: tuple,
        by_name: dict[str, Any],
        make: Callable[[], object],
    ) -> None:
        """Keeps what `make` returns, of a call with nothing but constants."""

def plan_again(wrapper: object, call: object, by_position: tuple, by_name: dict, /) -> bool:
    """Plans, and makes the plan the wrapper's, where the call differs from its last one in index
    arrays alone. False: nothing has changed, and Python has to plan or say what is wrong."""

def last_variant() -> str:
    """The id of what this thread ran last, as a wrapper's `variant` has it; "" before a run."""

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

class LaunchTarget:
    """A device, a stream of it, and the threads of a launch on the CPU."""

    def __init__(self, device: int, stream: int, num_threads: int) -> None: ...

class MergeStatesParams:
    """shape: [tokens, heads, head_dim]."""

    def __init__(self, dtype: DType, num_states: int, shape: tuple[int, int, int]) -> None: ...
    def set_inputs(self, v_a: int, s_a: int, v_b: int, s_b: int) -> None: ...
    def set_outputs(self, v: int, s: int, token_mask: int) -> None: ...
    def launch(self, target: LaunchTarget) -> None: ...

_Rows = tuple[int, int, int]  # address, strides of token and head in bytes
_Pool = tuple[int, int, int, int]  # address, strides of page, token and head in bytes
_Array = tuple[int, int, int, int]  # address, count, stride in elements, bytes of an element

class AppendParams:
    def __init__(self, num_tokens: int, num_pages: int, page_size: int) -> None: ...
    def set_k(self, rows: _Rows, pool: _Pool, num_heads: int, row_bytes: int) -> None: ...
    def set_v(self, rows: _Rows, pool: _Pool, num_heads: int, row_bytes: int) -> None: ...
    def set_places(self, batch_indices: _Array, positions: _Array) -> None: ...
    def set_page_table(self, indices: _Array, indptr: _Array, row: tuple[int, int]) -> None:
        """row: width and stride of a block table's rows; (0, 0): indices is a list."""

    def launch(self, target: LaunchTarget) -> None: ...

class PackBitsParams:
    def __init__(self, little: bool) -> None: ...
    def set_arrays(self, x: int, packed: int) -> None: ...
    def set_segments(self, begins: int, num_segments: int) -> None:
        """begins: the first elements of all segments and their end, then the first bytes; int64."""

    def launch(self, target: LaunchTarget) -> None: ...
