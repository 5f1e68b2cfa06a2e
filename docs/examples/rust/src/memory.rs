//! Memory of the device that preflash computes on: the CPU, or a GPU with `--cfg feature="cuda"`.

use std::ffi::c_void;

#[cfg(feature = "cuda")]
mod device {
    use std::ffi::{c_int, c_void};
    pub const DEVICE: c_int = 0;
    #[link(name = "cudart")]
    extern "C" {
        fn cudaMalloc(address: *mut *mut c_void, bytes: usize) -> c_int;
        fn cudaFree(address: *mut c_void) -> c_int;
        fn cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int) -> c_int;
    }
    const ANY_DIRECTION: c_int = 4;
    pub unsafe fn allocate(bytes: usize) -> *mut c_void {
        let mut address = std::ptr::null_mut();
        assert_eq!(cudaMalloc(&mut address, bytes), 0, "no {bytes} bytes on the GPU");
        address
    }
    pub unsafe fn free(address: *mut c_void, _bytes: usize) {
        cudaFree(address);
    }
    pub unsafe fn copy(to: *mut c_void, from: *const c_void, bytes: usize) {
        assert_eq!(cudaMemcpy(to, from, bytes, ANY_DIRECTION), 0);
    }
}

#[cfg(not(feature = "cuda"))]
mod device {
    use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
    use std::ffi::{c_int, c_void};
    pub const DEVICE: c_int = -1;
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 128).unwrap()
    }
    pub unsafe fn allocate(bytes: usize) -> *mut c_void {
        let address = alloc_zeroed(layout(bytes));
        if address.is_null() {
            handle_alloc_error(layout(bytes));
        }
        address as *mut c_void
    }
    pub unsafe fn free(address: *mut c_void, bytes: usize) {
        dealloc(address as *mut u8, layout(bytes));
    }
    pub unsafe fn copy(to: *mut c_void, from: *const c_void, bytes: usize) {
        std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes);
    }
}
pub use device::DEVICE;

/// Types of which every pattern of bits is a value.
pub trait Number: Copy + Default {}
impl Number for u16 {}
impl Number for i32 {}

/// Bytes on the device, at a multiple of 128.
pub struct Buffer {
    address: *mut c_void,
    bytes: usize,
}

impl Buffer {
    pub fn new(bytes: usize) -> Buffer {
        // SAFETY: freed once, with the same size.
        Buffer { address: unsafe { device::allocate(bytes.max(16)) }, bytes: bytes.max(16) }
    }

    pub fn address(&self) -> *mut c_void {
        self.address
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Makes it at least so large; what it held is lost.
    pub fn grow(&mut self, bytes: usize) {
        if self.bytes < bytes {
            *self = Buffer::new(bytes);
        }
    }

    /// Writes values from element `first` on.
    pub fn write<T: Number>(&mut self, first: usize, values: &[T]) {
        let size = size_of::<T>();
        let end = first.checked_add(values.len()).and_then(|count| count.checked_mul(size));
        assert!(end.is_some_and(|end| end <= self.bytes));
        // SAFETY: inside of the buffer, as asserted.
        unsafe {
            let to = (self.address as *mut u8).add(first * size) as *mut c_void;
            device::copy(to, values.as_ptr() as *const c_void, size_of_val(values));
        }
    }

    pub fn read<T: Number>(&self, count: usize) -> Vec<T> {
        assert!(count.checked_mul(size_of::<T>()).is_some_and(|end| end <= self.bytes));
        let mut values = vec![T::default(); count];
        // SAFETY: inside of both, as asserted.
        unsafe {
            device::copy(values.as_mut_ptr() as *mut c_void, self.address, size_of_val(&values[..]));
        }
        values
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by new() with this size.
        unsafe { device::free(self.address, self.bytes) }
    }
}
