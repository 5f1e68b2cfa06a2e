// A run like the last one, for other tensors: what run() is for every layer but the first. All that
// binding has checked is compared with what it found, in one call of CPython's own.
#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/fast_call.h"
#include "bindings/start_launch.h"
#include "bindings/torch_tensors.h"

namespace preflash {
namespace {

namespace py = pybind11;

// What a launch is bound to, beside its strides.
struct Repeat {
  std::shared_ptr<const Torch> torch;
  Starter starter;
  bool one_cache = false;  // holds K and V; V begins at v_offset
  std::int64_t v_offset = 0;
  TensorFacts q, k, v;
  std::optional<TensorFacts> out;  // none: made by make_out(q)
  py::object make_out;
  py::object partials;  // a tensor, or None
  py::object owner_of_extras;
  const RunExtras* extras = nullptr;  // null: none
};

// The arguments of a call.
struct Call {
  PyObject* q;
  PyObject* kv;       // a cache that holds both, or a tuple of two
  PyObject* out;      // or None
  PyObject* scales;   // a tuple: of the logits, of the output
  PyObject* variant;  // whose launch it is: the stream of its last run, and who hears of captures

  static constexpr Py_ssize_t kArguments = 5;
};

struct KeysValues {
  PyObject* k = nullptr;  // null: not what is bound
  PyObject* v = nullptr;

  KeysValues(PyObject* given, bool one_cache) {
    if (one_cache) {
      k = v = given;
    } else if (PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == 2) {
      k = PyTuple_GET_ITEM(given, 0);
      v = PyTuple_GET_ITEM(given, 1);
    }
  }
};

// A tensor that is as it was.
std::optional<dlpack::Tensor> same(const Torch& torch, PyObject* tensor, const TensorFacts& facts) {
  std::optional<dlpack::Tensor> read = torch.read(tensor);
  if (read && (!facts.fit(*read) || torch.is_negative(tensor))) read.reset();
  return read;
}

// The first run on another stream has more to do.
bool is_last_stream(PyObject* variant, void* stream) {
  static PyObject* const name = PyUnicode_InternFromString("_stream");
  const auto last = py::reinterpret_steal<py::object>(PyObject_GetAttr(variant, name));
  if (!last) throw py::error_already_set();
  return address_of(last.ptr()) == reinterpret_cast<Address>(stream);
}

// The result; null, and nothing has been done, where this is not the run that is bound.
py::object repeat(const Repeat& bound, const Call& call) {
  const Torch& torch = *bound.torch;
  const KeysValues kv(call.kv, bound.one_cache);
  const bool brings_out = call.out != Py_None;
  if (kv.k == nullptr || brings_out != bound.out.has_value()) return {};
  const auto q = same(torch, call.q, bound.q);
  const auto k = same(torch, kv.k, bound.k);
  const auto v = bound.one_cache ? k : same(torch, kv.v, bound.v);
  const auto given = brings_out ? same(torch, call.out, *bound.out) : q;
  PyObject* const written = brings_out ? call.out : call.q;
  if (!q || !k || !v || !given || torch.records({call.q, kv.k, kv.v, written})) return {};
  const auto stream = torch.current_stream(q->device);
  if (!stream || !is_last_stream(call.variant, *stream)) return {};

  py::object result = brings_out ? py::reinterpret_borrow<py::object>(call.out)
                                 : bound.make_out(py::handle(call.q));
  const auto out = brings_out ? given : torch.read(result.ptr());
  if (!out) return {};
  const bool captured =
      bound.starter.start({.segments = segment_arguments(
                               q->address(), k->address(), v->address() + bound.v_offset,
                               out->address(), 0, float_of(PyTuple_GET_ITEM(call.scales, 0)),
                               float_of(PyTuple_GET_ITEM(call.scales, 1)), 1.0f, bound.extras),
                           .stream = *stream},
                          bound.partials);
  if (captured) {
    py::handle(call.variant)
        .attr("_note_capture")(py::handle(call.q), py::handle(kv.k), py::handle(kv.v),
                               bound.partials);
  }
  if (brings_out) torch.tell_written(call.out);
  return result;
}

PyObject* again(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != Call::kArguments || !PyTuple_Check(given[3]) || PyTuple_GET_SIZE(given[3]) != 2) {
    return PyErr_Format(PyExc_TypeError, "a repeated run takes q, kv, out, scales, variant");
  }
  try {
    py::object result =
        repeat(state_of<Repeat>(self), {given[0], given[1], given[2], given[3], given[4]});
    return result ? result.release().ptr() : py::none().release().ptr();
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef again_definition = fast_definition(
    "again", &again, "Starts a launch for tensors like those that it is bound to, or is None.");

py::object repeater_of(const py::object& launch, std::shared_ptr<HeldMemory> memory,
                       std::shared_ptr<const Torch> torch, const py::object& num_threads,
                       const py::object& q, const py::object& kv, const py::object& out,
                       std::int64_t v_offset, const py::object& make_out,
                       const py::object& partials, const py::object& extras) {
  const auto facts = [&](const py::handle& tensor) -> std::optional<TensorFacts> {
    const std::optional<dlpack::Tensor> read = torch->read(tensor.ptr());
    return read ? TensorFacts::of(*read) : std::nullopt;
  };
  if (torch->exchange == nullptr) return py::none();
  const bool one_cache = !PyTuple_CheckExact(kv.ptr());
  const KeysValues given(kv.ptr(), one_cache);
  if (given.k == nullptr) return py::none();
  const auto q_facts = facts(q);
  const auto k_facts = facts(given.k);
  const auto v_facts = facts(given.v);
  const auto out_facts = out.is_none() ? std::nullopt : facts(out);
  if (!q_facts || !k_facts || !v_facts || (!out.is_none() && !out_facts)) return py::none();
  return fast_callable(
      again_definition,
      Repeat{.torch = std::move(torch),
             .starter = Starter::of(launch, std::move(memory), num_threads),
             .one_cache = one_cache,
             .v_offset = v_offset,
             .q = *q_facts,
             .k = *k_facts,
             .v = *v_facts,
             .out = out_facts,
             .make_out = make_out,
             .partials = partials,
             .owner_of_extras = extras,
             .extras = extras.is_none() ? nullptr : extras.cast<const RunExtras*>()});
}

}  // namespace

void bind_repeat(py::module_& m) {
  m.def("repeater", &repeater_of, py::arg("launch"), py::arg("memory"), py::arg("torch"),
        py::arg("num_threads"), py::arg("q"), py::arg("kv"), py::arg("out"), py::arg("v_offset"),
        py::arg("make_out"), py::arg("partials"), py::arg("extras"));
}

}  // namespace preflash
