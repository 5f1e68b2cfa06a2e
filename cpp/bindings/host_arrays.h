// The index arrays of plan() in their usual form: contiguous one-dimensional int32 tensors on the
// CPU. Python handles all others, and says what is wrong with them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bindings/torch_tensors.h"
#include "core/batch.h"
#include "core/device_plan.h"

namespace preflash {

// True under PREFLASH_DEBUG=1, which also checks values on the GPU, with a wait for it.
bool debugging();

// torch's methods, called as from Python, for what the protocol's table does not tell. An older
// torch has no such table, and no usual arrays.
struct HostArrays {
  explicit HostArrays(std::shared_ptr<const Torch> torch);

  std::shared_ptr<const Torch> torch;
  pybind11::object is_neg, storage_offset, untyped_storage;  // methods
};

// Tensors. page_size 0: ragged, without tensors of pages.
struct GivenArrays {
  PyObject* qo_indptr = nullptr;  // null: one query a request
  PyObject* kv_indptr = nullptr;
  PyObject* indices = nullptr;
  PyObject* last_page_len = nullptr;
  int page_size = 0;
  const Uploader* uploader = nullptr;        // null: not known yet
  PyObject* indices_buffer = nullptr;        // of CUDA graphs, for the page indices
  bool kv_lengths_are_upper_bounds = false;  // so that entries of a block table may be anything
};

struct BatchOfArrays {
  std::shared_ptr<Batch> batch;
  bool has_pages = false;          // false: ragged, or left to Python's checks
  bool pages_on_gpu = false;       // where they are not read
  std::int64_t largest_page = -1;  // -1: not known
  // Entries from the first to the last of a block table; none: a list of pages.
  std::optional<std::int64_t> table_extent = {};
};

// None: an array is unusual, or their sizes do not fit. Throws what torch raises for a tensor that
// is no ordinary one.
std::optional<BatchOfArrays> batch_of_usual(const HostArrays& torch, const GivenArrays& given);

// True for a usual array on the device (-1: the CPU).
bool is_usual(const HostArrays& torch, PyObject* given, int device);
// True if a usual array on the device has as many lengths as the batch has requests.
bool is_kv_lens(const HostArrays& torch, PyObject* given, const Batch& batch, int device);
// True if a usual array holds the batch's lengths of keys.
bool has_kv_lens(const HostArrays& torch, PyObject* given, const Batch& batch);

}  // namespace preflash
