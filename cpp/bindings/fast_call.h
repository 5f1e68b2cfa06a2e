// Python functions without pybind11's dispatcher, which would take longer than the hot calls
// themselves.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <initializer_list>
#include <memory>
#include <utility>

namespace preflash {

// Translates the current C++ exception into Python's, as for every other function of the module.
// Returns null.
PyObject* raise(std::exception_ptr thrown);

template <class State>
State& state_of(PyObject* self) {
  return *static_cast<State*>(PyCapsule_GetPointer(self, nullptr));
}

// A function of CPython's own (METH_FASTCALL) whose `self` holds the state. definition: of static
// lifetime.
template <class State>
pybind11::object fast_callable(PyMethodDef& definition, State state) {
  auto held = std::make_unique<State>(std::move(state));
  const pybind11::capsule self(held.get(), [](void* kept) { delete static_cast<State*>(kept); });
  held.release();
  return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&definition, self.ptr()));
}

using FastFunction = PyObject* (*)(PyObject* self, PyObject* const* given, Py_ssize_t count);

// Casts `given[i]` to T.
template <class T>
T argument(PyObject* const* given, int i) {
  return pybind11::handle(given[i]).cast<T>();
}

// Makes the functions of the module. definitions: of static lifetime.
void add_functions(pybind11::module_& m, std::initializer_list<PyMethodDef*> definitions);

inline PyMethodDef fast_definition(const char* name, FastFunction function, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL,
          doc};
}

}  // namespace preflash
