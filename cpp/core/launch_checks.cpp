// Checks that every run makes before it launches. They take nanoseconds.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/launch.h"
#include "core/memory_span.h"

namespace preflash {
namespace {

// A view of freed storage lies at its offset from null. No memory is mapped so low: on a GPU below
// 4 GiB, in a process below the smallest address of a program.
bool is_freed(const void* address, int device) {
  const std::uintptr_t lowest = std::uintptr_t{1} << (device == kCpuDevice ? 22 : 32);
  return reinterpret_cast<std::uintptr_t>(address) < lowest;
}

// Name of a tensor in error messages.
struct TensorName {
  const char* side;  // prefix in a launch of two segments; else empty
  const char* name;

  std::string text() const { return std::string(side) + name; }
};

// A launch of two segments runs a prefill and a decode batch.
const char* side_of(int segment, int num_segments) {
  if (num_segments == 1) return "";
  return segment == 0 ? "prefill side's " : "decode side's ";
}

[[noreturn]] void refuse_address(const TensorName& name, const void* address, int device) {
  if (is_freed(address, device)) {
    throw std::invalid_argument(
        name.text() +
        " has no memory behind it (a FakeTensor, or storage that was freed): pass a tensor with "
        "data");
  }
  throw std::invalid_argument(
      name.text() + " starts at an address that is " +
      std::to_string(reinterpret_cast<std::uintptr_t>(address) % 16) +
      " past a multiple of 16 bytes; kernels load 16 bytes at a time: make a contiguous copy");
}

// An address that a kernel will read or write `bytes` from.
void check_address(const TensorName& name, const void* address, std::int64_t bytes, int device) {
  if (bytes == 0) return;
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0 || is_freed(address, device)) {
    refuse_address(name, address, device);
  }
}

// A tensor with its name and its address in this run.
struct Placed {
  TensorName name;
  const void* address;
  const MemorySpan& span;
};

void check_apart(const Placed& written, const Placed& other) {
  if (!may_overlap(written.address, written.span, other.address, other.span)) return;
  const std::string name = written.name.text();
  throw std::invalid_argument(name + " shares memory with " + other.name.text() +
                              ", which would be overwritten while it is in use: give " + name +
                              " memory of its own");
}

}  // namespace

void Launch::check(const RunArguments& arguments) const {
  const int num_segments = arguments.segments.size();
  if (num_segments != tensors_.size()) {
    throw std::invalid_argument("the launch has " + std::to_string(tensors_.size()) +
                                " segments, the run brings arguments of " +
                                std::to_string(num_segments));
  }
  check_workspaces(arguments);
  for (int s = 0; s < num_segments; ++s) {
    check_addresses(s, arguments);
    check_inputs(s, arguments);
    check_mask(s, arguments.segments[s].extras);
    check_page_indices(s);
  }
  for (int s = 0; s < num_segments; ++s) {
    for (int other = 0; other < num_segments; ++other) check_outputs(s, other, arguments);
  }
}

void Launch::check_workspaces(const RunArguments& arguments) const {
  if (arguments.float_workspace_bytes < plan_->float_bytes()) {
    throw std::invalid_argument(
        "float_workspace_buffer has " + std::to_string(arguments.float_workspace_bytes) +
        " bytes; this plan needs " + std::to_string(plan_->float_bytes()) +
        ": it was given other memory after plan(); give it as much, or call plan() again");
  }
  if (place_->overwritten()) {
    throw std::invalid_argument(
        "int_workspace_buffer holds the work list of another wrapper, which was planned into the "
        "same memory later: give each wrapper an int workspace of its own "
        "(reset_workspace_buffer), or call plan() again before this run()");
  }
}

void Launch::check_mask(int index, const RunExtras& extras) const {
  const PlannedSegment& planned = plan_->segments()[index];
  if (planned.options.mask != Mask::kCustom || planned.batch->mask_bytes() == 0) return;
  const char* side = side_of(index, plan_->segments().size());
  if (is_freed(extras.mask_bits, plan_->device())) {
    refuse_address({side, "custom_mask"}, extras.mask_bits, plan_->device());
  }
}

// Page indices in the plan's own memory were checked when the tensors were bound.
void Launch::check_page_indices(int index) const {
  const Batch& batch = *plan_->segments()[index].batch;
  if (plan_->device() != kCpuDevice || !place_->page_indices_are_callers(index)) return;
  if (batch.lengths_are_upper_bounds() || batch.kv_lengths_are_upper_bounds()) return;
  const std::int32_t largest = batch.largest_page_of(place_->page_indices(index), batch.kv_end());
  const std::int64_t num_pages = tensors_[index].k.num_pages;
  if (largest < num_pages) return;
  throw std::invalid_argument(std::string(side_of(index, plan_->segments().size())) +
                              "paged_kv_indices holds " + std::to_string(largest) +
                              "; the cache has " + std::to_string(num_pages) +
                              " pages, so an index must be less than " + std::to_string(num_pages));
}

void Launch::check_addresses(int index, const RunArguments& arguments) const {
  const int device = plan_->device();
  const SegmentArguments& segment = arguments.segments[index];
  const TensorSpans& spans = spans_[index];
  const char* side = side_of(index, arguments.segments.size());
  check_address({side, "q"}, segment.q, spans.q.extent(), device);
  check_address({side, "k"}, segment.k, spans.k.extent(), device);
  check_address({side, "v"}, segment.v, spans.v.extent(), device);
  check_address({side, "out"}, segment.o, spans.o.extent(), device);
  check_address({"", "float_workspace_buffer"}, arguments.float_workspace, plan_->float_bytes(),
                device);
  if (segment.lse != nullptr && is_freed(segment.lse, device)) {
    refuse_address({side, "lse"}, segment.lse, device);
  }
  for (const HeadTensor& tensor : kHeadTensors) {
    const float* address = segment.extras.*tensor.address;
    if (address != nullptr && is_freed(address, device)) {
      refuse_address({side, tensor.name}, address, device);
    }
  }
}

void Launch::check_inputs(int index, const RunArguments& arguments) const {
  if (arguments.float_workspace == nullptr) return;
  const MemorySpan bytes = span_of_bytes(plan_->float_bytes());
  const Placed partials{{"", "float_workspace_buffer"}, arguments.float_workspace, bytes};
  const SegmentArguments& segment = arguments.segments[index];
  const TensorSpans& spans = spans_[index];
  const char* side = side_of(index, arguments.segments.size());
  check_apart(partials, {{side, "q"}, segment.q, spans.q});
  check_apart(partials, {{side, "k"}, segment.k, spans.k});
  check_apart(partials, {{side, "v"}, segment.v, spans.v});
}

void Launch::check_outputs(int index, int other_index, const RunArguments& arguments) const {
  const int num_segments = arguments.segments.size();
  const SegmentArguments& segment = arguments.segments[index];
  const SegmentArguments& other = arguments.segments[other_index];
  const TensorSpans& spans = spans_[other_index];
  const char* own_side = side_of(index, num_segments);
  const char* side = side_of(other_index, num_segments);
  const bool same = index == other_index;

  // The whole workspace, even if this plan uses less: the next plan may use the rest.
  const MemorySpan scratch = span_of_bytes(arguments.float_workspace_bytes);
  const MemorySpan work_list = span_of_bytes(plan_->int_bytes());
  const MemorySpan kv_lens = span_of_bytes(plan_->segments()[other_index].batch->num_requests() *
                                           std::int64_t{sizeof(std::int32_t)});
  const Placed read[] = {
      {{side, "k"}, other.k, spans.k},
      {{side, "v"}, other.v, spans.v},
      {{"", "float_workspace_buffer"}, arguments.float_workspace, scratch},
      {{"", "int_workspace_buffer"}, place_->memory(), work_list},
      {{side, "seq_lens"}, other.extras.kv_lens, kv_lens},
  };
  const Placed q{{side, "q"}, other.q, spans.q};
  const Placed others_out{{side, "out"}, other.o, spans.o};
  auto check_apart_from_read = [&](const Placed& written) {
    for (const Placed& one : read) {
      if (one.address != nullptr) check_apart(written, one);
    }
    for (const HeadTensor& tensor : kHeadTensors) {
      const float* address = other.extras.*tensor.address;
      if (address == nullptr) continue;
      check_apart(written, {{side, tensor.name}, address, spans.of(tensor)});
    }
  };
  const Placed out{{own_side, "out"}, segment.o, spans_[index].o};
  // out may be q where one CTA computes an item: it reads the item's rows of q, which no other CTA
  // reads, before it writes the same rows of out.
  const bool in_place = same && segment.o == segment.q && spans.o == spans.q;
  if (!in_place || plan_->kernel().ctas_per_item > 1) check_apart(out, q);
  check_apart_from_read(out);
  if (index < other_index) check_apart(out, others_out);
  if (segment.lse == nullptr) return;
  const Placed lse{{own_side, "lse"}, segment.lse, spans_[index].lse};
  check_apart(lse, others_out);
  check_apart(lse, q);
  check_apart_from_read(lse);
  if (index < other_index && other.lse != nullptr) {
    check_apart(lse, {{side, "lse"}, other.lse, spans.lse});
  }
}

}  // namespace preflash
