// pybind11 is used in this directory only: convert, call, return. Pointers, strides and streams
// cross the border as integers, so one kernel build serves every version of Python and of torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "preflash/per_segment.h"

namespace preflash {

class PageArray;
class Uploader;

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// One of a list's items for each segment.
template <class T, class Convert>
PerSegment<T> per_segment(const pybind11::sequence& given, Convert&& convert) {
  if (given.empty() || given.size() > kMaxSegments) {
    throw pybind11::value_error("a launch has one or two segments, not " +
                                std::to_string(given.size()));
  }
  PerSegment<T> items;
  for (const pybind11::handle item : given) items.add(convert(item));
  return items;
}

// New memory for this many page indices. Releases the GIL meanwhile.
std::shared_ptr<PageArray> make_page_array(const Uploader& uploader, std::int64_t count);

void bind_torch(pybind11::module_& m);
void bind_batch(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_run_memory(pybind11::module_& m);
void bind_workspace(pybind11::module_& m);
void bind_run(pybind11::module_& m);
void bind_host_arrays(pybind11::module_& m);
void bind_repeated_plan(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_trace(pybind11::module_& m);
void bind_introspection(pybind11::module_& m);

}  // namespace preflash
