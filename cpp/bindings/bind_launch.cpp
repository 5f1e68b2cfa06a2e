// Launches for Python. A run() of the wrappers comes through here for every layer, so that its call
// is one of CPython's own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <exception>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fast_call.h"
#include "bindings/start_launch.h"
#include "core/device.h"
#include "core/launch.h"
#include "core/memory_span.h"

namespace preflash {
namespace {

namespace py = pybind11;

using TokenHead = std::array<std::int64_t, 2>;      // strides of [token, head]
using TokenHeadRows = std::array<std::int64_t, 3>;  // and the number of tokens
using TokenHeadValues =
    std::array<std::int64_t, 3>;  // and the values of a row, LseTensor::values()
// Strides of [page, token, head], then the numbers of pages and of tokens in one.
using PageTokenHead = std::array<std::int64_t, 5>;

RowTensor row_tensor(const TokenHead& strides) {
  return {.stride_token = strides[0], .stride_head = strides[1]};
}

RowTensor row_tensor(const TokenHeadRows& numbers) {
  return {.stride_token = numbers[0], .stride_head = numbers[1], .num_tokens = numbers[2]};
}

KvTensor kv_tensor(const PageTokenHead& numbers) {
  return {.stride_page = numbers[0],
          .stride_token = numbers[1],
          .stride_head = numbers[2],
          .num_pages = numbers[3],
          .num_tokens = numbers[4]};
}

RunTensors run_tensors(const TokenHeadRows& q, const PageTokenHead& k, const PageTokenHead& v,
                       const TokenHead& o, const TokenHeadValues& lse) {
  return {.q = row_tensor(q),
          .k = kv_tensor(k),
          .v = kv_tensor(v),
          .o = row_tensor(o),
          .lse = {.stride_token = lse[0],
                  .stride_head = lse[1],
                  .form = lse[2] == 2 ? LseForm::kMaxAndSum : LseForm::kLogSum}};
}

constexpr Py_ssize_t kStartArguments = 11;

// (q, k, v, o, lse, float_workspace, stream, sm_scale, out_scale, lse_scale, extras), of which the
// float workspace is a tensor or None.
RunArguments run_arguments(PyObject* const* given) {
  const auto* extras =
      given[10] == Py_None ? nullptr : py::handle(given[10]).cast<const RunExtras*>();
  return {.segments =
              segment_arguments(address_of(given[0]), address_of(given[1]), address_of(given[2]),
                                address_of(given[3]), address_of(given[4]), float_of(given[7]),
                                float_of(given[8]), float_of(given[9]), extras),
          .stream = pointer<void>(address_of(given[6]))};
}

PyObject* start(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != kStartArguments) {
    return PyErr_Format(PyExc_TypeError, "a launch takes %zd arguments, not %zd", kStartArguments,
                        count);
  }
  try {
    return PyBool_FromLong(state_of<Starter>(self).start(run_arguments(given), given[5]));
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef start_definition = fast_definition(
    "start", &start, "Starts a prepared launch; True where it was captured into a CUDA graph.");

py::object starter_of(const py::object& launch, std::shared_ptr<HeldMemory> memory,
                      const py::object& num_threads) {
  return fast_callable(start_definition, Starter::of(launch, std::move(memory), num_threads));
}

// One (q, k, v, o, lse, sm_scale, out_scale, lse_scale, extras) for each segment.
bool run_segments(Launch& launch, const HeldMemory& memory, const py::sequence& segments,
                  const py::object& float_workspace, Address stream, int num_threads) {
  check_num_threads(num_threads);
  RunArguments arguments{.segments = per_segment<SegmentArguments>(
                             segments,
                             [](const py::handle& given) {
                               using Row = std::tuple<Address, Address, Address, Address, Address,
                                                      float, float, float, const RunExtras*>;
                               return std::apply(&segment_arguments, given.cast<Row>());
                             }),
                         .stream = pointer<void>(stream),
                         .num_threads = num_threads};
  use_memory(memory, float_workspace, &arguments);
  py::gil_scoped_release release;
  return run_interruptibly(launch, arguments);
}

// Address, (stride, count) of the dimensions before the last, and the bytes of a row.
using Strided =
    std::tuple<Address, std::vector<std::pair<std::int64_t, std::int64_t>>, std::int64_t>;

MemorySpan span_of(const Strided& tensor) {
  const auto& [address, dimensions, row_bytes] = tensor;
  MemorySpan span{.row_bytes = row_bytes};
  if (dimensions.size() > span.dimensions.size())
    throw std::invalid_argument("too many dimensions");
  for (std::size_t i = 0; i < dimensions.size(); ++i) {
    span.dimensions[i] = {.stride = dimensions[i].first, .count = dimensions[i].second};
  }
  return span;
}

bool tensors_may_overlap(const Strided& a, const Strided& b) {
  return may_overlap(pointer<void>(std::get<0>(a)), span_of(a), pointer<void>(std::get<0>(b)),
                     span_of(b));
}

}  // namespace

void bind_launch(py::module_& m) {
  m.def("may_overlap", &tensors_may_overlap, py::arg("a"), py::arg("b"));
  py::class_<Launch>(m, "Launch")
      .def(py::init([](std::shared_ptr<DevicePlan> place, const TokenHeadRows& q,
                       const PageTokenHead& k, const PageTokenHead& v, const TokenHead& o,
                       const TokenHeadValues& lse) {
             return std::make_unique<Launch>(std::move(place), run_tensors(q, k, v, o, lse));
           }),
           py::arg("place"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"), py::arg("lse"))
      .def_static(
          "of_segments",
          [](std::shared_ptr<DevicePlan> place, const py::sequence& segments) {
            auto tensors = [](const py::handle& given) {
              using Row = std::tuple<TokenHeadRows, PageTokenHead, PageTokenHead, TokenHead,
                                     TokenHeadValues>;
              return std::apply(&run_tensors, given.cast<Row>());
            };
            return std::make_unique<Launch>(std::move(place),
                                            per_segment<RunTensors>(segments, tensors));
          },
          "Bound to (q, k, v, o, lse) of each segment.", py::arg("place"), py::arg("segments"))
      .def("starter", &starter_of, py::arg("memory"), py::arg("num_threads").none(true))
      .def("run_segments", &run_segments, py::arg("memory"), py::arg("segments"),
           py::arg("float_workspace"), py::arg("stream"), py::arg("num_threads"));
}

}  // namespace preflash
