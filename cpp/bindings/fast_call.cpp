#include "bindings/fast_call.h"

#include "bindings/guard.h"

namespace preflash {

namespace py = pybind11;

PyObject* raise(std::exception_ptr thrown) {
  const auto& rethrow = made_once<py::cpp_function>([] {
    return py::cpp_function([](const py::capsule& held) {
      std::rethrow_exception(*held.get_pointer<std::exception_ptr>());
    });
  });
  PyObject* held = PyCapsule_New(&thrown, nullptr, nullptr);
  if (held == nullptr) return nullptr;
  PyObject* nothing = PyObject_CallOneArg(rethrow.ptr(), held);
  Py_DECREF(held);
  return nothing;
}

void add_functions(py::module_& m, std::initializer_list<PyMethodDef*> definitions) {
  for (PyMethodDef* definition : definitions) {
    m.attr(definition->ml_name) =
        py::reinterpret_steal<py::object>(PyCFunction_New(definition, nullptr));
  }
}

}  // namespace preflash
