//! A safe wrapper of preflash.h for one batch with pages in bfloat16.

use crate::memory::Buffer;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::{null, null_mut};

#[repr(C)]
struct Segment {
    size: usize,
    num_qo_heads: i32,
    num_kv_heads: i32,
    head_dim_qk: i32,
    head_dim_vo: i32,
    q_dtype: c_int,
    kv_dtype: c_int,
    o_dtype: c_int,
    causal: i32,
    custom_mask: i32,
    window_left: i32,
    soft_cap: f32,
    position: c_int,
    rope_scale: f64,
    rope_theta: f64,
    batch_invariant: i32,
    num_requests: i32,
    qo_indptr: *const i32,
    kv_indptr: *const i32,
    page_size: i32,
    last_page_len: *const i32,
    page_indices: *const i32,
    block_table_stride: i64,
    kv_lens: *const i32,
    graph_max_rows: i32,
    reserved: i32,
}

#[repr(C)]
struct Memory {
    size: usize,
    int_bytes: usize,
    float_bytes: usize,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    stride_page: i64,
    stride_token: i64,
    stride_head: i64,
    num_pages: i64,
    num_tokens: i64,
}

#[repr(C)]
struct Tensors {
    size: usize,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: *mut f32,
    lse_stride_token: i64,
    lse_stride_head: i64,
    sm_scale: f32,
    out_scale: f32,
    sinks: *const f32,
    mask_bits: *const u8,
}

#[repr(C)]
struct RawPlan {
    _private: [u8; 0],
}

const AUTO: c_int = 0;
const BFLOAT16: c_int = 2;

#[link(name = "preflash")]
extern "C" {
    fn preflash_abi_version() -> c_int;
    fn preflash_last_error() -> *const c_char;
    fn preflash_sizes(d: c_int, b: c_int, s: *const Segment, n: c_int, m: *mut Memory) -> c_int;
    fn preflash_plan_create(device: c_int, plan: *mut *mut RawPlan) -> c_int;
    fn preflash_plan_destroy(plan: *mut RawPlan);
    fn preflash_plan_batch(
        plan: *mut RawPlan, backend: c_int, segments: *const Segment, num_segments: c_int,
        int_memory: *mut c_void, int_bytes: usize, float_bytes: usize, stream: *mut c_void,
    ) -> c_int;
    fn preflash_plan_variant(plan: *const RawPlan) -> *const c_char;
    fn preflash_run(
        plan: *mut RawPlan, tensors: *const Tensors, num_segments: c_int,
        float_memory: *mut c_void, float_bytes: usize, stream: *mut c_void,
    ) -> c_int;
}

/// The sentence of preflash_last_error().
#[derive(Debug)]
pub struct Error(pub String);

fn check(status: c_int) -> Result<(), Error> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: a string of this thread, valid until its next failing call.
    let said = unsafe { CStr::from_ptr(preflash_last_error()) };
    Err(Error(said.to_string_lossy().into_owned()))
}

#[derive(Clone, Copy)]
pub struct Shape {
    pub num_qo_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub page_size: usize,
}

/// Lengths and pages of a batch. Request i has rows qo_indptr[i]..qo_indptr[i + 1] and pages
/// kv_indptr[i]..kv_indptr[i + 1] of `pages`.
pub struct Batch {
    pub qo_indptr: Vec<i32>,
    pub kv_indptr: Vec<i32>,
    pub last_page_len: Vec<i32>,
    pub pages: Vec<i32>,
}

/// A plan and its memory on one device.
pub struct Plan {
    raw: *mut RawPlan,
    shape: Shape,
    rows: usize,
    num_pages: usize, // that k and v must have
    pages: Buffer,
    work_list: Buffer,
    partials: Buffer,
}

impl Plan {
    pub fn new(shape: Shape) -> Result<Plan, Error> {
        // SAFETY: preflash_abi_version() takes nothing.
        let found = unsafe { preflash_abi_version() };
        if found != 1 {
            return Err(Error(format!("libpreflash.so has ABI {found}, this wrapper is for 1")));
        }
        let mut raw = null_mut();
        // SAFETY: `raw` is where the plan's address goes.
        check(unsafe { preflash_plan_create(crate::memory::DEVICE, &mut raw) })?;
        let empty = || Buffer::new(16);
        Ok(Plan { raw, shape, rows: 0, num_pages: 0, pages: empty(), work_list: empty(), partials: empty() })
    }

    /// Plans causal attention whose bits do not depend on the batch.
    pub fn batch(&mut self, batch: &Batch) -> Result<(), Error> {
        let requests = batch.last_page_len.len();
        assert_eq!((batch.qo_indptr.len(), batch.kv_indptr.len()), (requests + 1, requests + 1));
        let listed = *batch.kv_indptr.last().unwrap_or(&0);
        assert!(batch.pages.len() as i32 >= listed, "{listed} pages are named");
        let (least, most) = (batch.pages.iter().min(), batch.pages.iter().max());
        assert!(*least.unwrap_or(&0) >= 0, "pages are counted from 0");
        let mut pages = Buffer::new(batch.pages.len().max(4) * 4);
        pages.write(0, &batch.pages);
        let segment = self.segment(batch, requests, &pages);
        let mut need = Memory { size: size_of::<Memory>(), int_bytes: 0, float_bytes: 0 };
        // SAFETY: `segment` points into `batch` and `pages`, which outlive the calls. The plan keeps
        // the addresses of `pages` and of the work list: both are its own until the next plan.
        unsafe {
            check(preflash_sizes(crate::memory::DEVICE, AUTO, &segment, 1, &mut need))?;
            let work_list = Buffer::new(need.int_bytes);
            self.partials.grow(need.float_bytes);
            let (memory, bytes, floats) = (work_list.address(), work_list.len(), self.partials.len());
            check(preflash_plan_batch(self.raw, AUTO, &segment, 1, memory, bytes, floats, null_mut()))?;
            self.work_list = work_list;
        }
        self.pages = pages;
        self.num_pages = most.map_or(0, |&page| page as usize + 1);
        self.rows = *batch.qo_indptr.last().unwrap_or(&0) as usize;
        Ok(())
    }

    /// One layer: q and out are [rows, num_qo_heads, head_dim], k and v [pages, page_size,
    /// num_kv_heads, head_dim].
    pub fn run(&mut self, q: &Buffer, k: &Buffer, v: &Buffer, out: &mut Buffer) -> Result<(), Error> {
        let s = self.shape;
        let page = s.page_size * s.num_kv_heads * s.head_dim;
        let row_bytes = 2 * s.num_qo_heads * s.head_dim;
        assert!(q.len() >= self.rows * row_bytes && out.len() >= self.rows * row_bytes);
        assert!(k.len() == v.len() && k.len() >= self.num_pages * 2 * page);
        let rows = |b: &Buffer| Tensor {
            data: b.address(),
            stride_page: 0,
            stride_token: (s.num_qo_heads * s.head_dim) as i64,
            stride_head: s.head_dim as i64,
            num_pages: 1,
            num_tokens: self.rows as i64,
        };
        let cache = |b: &Buffer| Tensor {
            data: b.address(),
            stride_page: page as i64,
            stride_token: (s.num_kv_heads * s.head_dim) as i64,
            stride_head: s.head_dim as i64,
            num_pages: (b.len() / (2 * page)) as i64,
            num_tokens: s.page_size as i64,
        };
        let tensors = Tensors {
            size: size_of::<Tensors>(),
            q: rows(q), k: cache(k), v: cache(v), out: rows(out),
            lse: null_mut(), lse_stride_token: 0, lse_stride_head: 0,
            sm_scale: (s.head_dim as f32).powf(-0.5), out_scale: 1.0,
            sinks: null(), mask_bits: null(),
        };
        let (memory, bytes) = (self.partials.address(), self.partials.len());
        // SAFETY: the lengths of all buffers were compared with the plan above.
        check(unsafe { preflash_run(self.raw, &tensors, 1, memory, bytes, null_mut()) })
    }

    pub fn variant(&self) -> String {
        // SAFETY: NULL before batch(), else a string of the plan.
        let name = unsafe { preflash_plan_variant(self.raw) };
        if name.is_null() { String::new() } else {
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        }
    }

    fn segment(&self, batch: &Batch, requests: usize, pages: &Buffer) -> Segment {
        let s = self.shape;
        Segment {
            size: size_of::<Segment>(),
            num_qo_heads: s.num_qo_heads as i32, num_kv_heads: s.num_kv_heads as i32,
            head_dim_qk: s.head_dim as i32, head_dim_vo: s.head_dim as i32,
            q_dtype: BFLOAT16, kv_dtype: BFLOAT16, o_dtype: BFLOAT16,
            causal: 1, custom_mask: 0, window_left: -1, soft_cap: 0.0,
            position: 0, rope_scale: 1.0, rope_theta: 1e4,
            batch_invariant: 1, num_requests: requests as i32,
            qo_indptr: batch.qo_indptr.as_ptr(), kv_indptr: batch.kv_indptr.as_ptr(),
            page_size: s.page_size as i32, last_page_len: batch.last_page_len.as_ptr(),
            page_indices: pages.address() as *const i32,
            block_table_stride: 0, kv_lens: null(), graph_max_rows: 0, reserved: 0,
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by preflash_plan_create(), and destroyed once.
        unsafe { preflash_plan_destroy(self.raw) }
    }
}
