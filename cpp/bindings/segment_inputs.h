// Arguments and tensors of one segment of a run.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <span>

#include "bindings/run_memory.h"
#include "bindings/torch_tensors.h"
#include "core/launch.h"

namespace preflash {

// Throws pybind11's type_error: no run has this many arguments.
[[noreturn]] void refuse_arguments();

// Arguments of one segment. All of these objects live for the duration of the call.
struct SegmentInputs {
  // q, kv (a cache that holds both, or a pair), scales (of the logits, of the output), outputs
  // (out or None, lse or None, return_lse, lse_base, lse_layout), and memory: None, a RunMemory, or
  // a tuple of per-head tensors, None where absent (kHeadTensors).
  static constexpr int kArguments = 5;

  PyObject* q;
  PyObject* k;
  PyObject* v;
  PyObject* out;  // null: made for the run
  PyObject* lse;
  bool one_cache;  // k and v are one tensor
  bool return_lse;
  char lse_layout;
  float sm_scale, out_scale, lse_scale;
  const RunMemory* memory = nullptr;  // null: the plan's
  std::span<PyObject* const> heads;   // kHeadTensors, None where absent; empty: the memory's
  pybind11::object pair;              // holds k and v

  // Throws pybind11's type_error for any other tuple.
  explicit SegmentInputs(PyObject* const* arguments);

  bool wants_lse() const { return return_lse || lse != nullptr; }
};

// The current addresses of a segment's tensors, and what they look like.
struct TensorDescs {
  SegmentFacts facts;
  Address q = 0, k = 0, v = 0, out = 0, lse = 0;
  std::array<Address, SegmentFacts::kHeadTensorCount> heads = {};

  // Throws what torch raises for values that are no ordinary tensors.
  TensorDescs(const Torch& torch, const SegmentInputs& given);
  void see_lse(const Torch& torch, PyObject* tensor);
  // True if the lse has elements but no memory.
  bool lse_is_unbacked() const;
  // Adds the per-head tensors (kHeadTensors) to a run's extras.
  void add_heads(RunExtras* extras) const;
};

}  // namespace preflash
