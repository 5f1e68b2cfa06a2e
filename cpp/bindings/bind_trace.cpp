// Records of work items for Python.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "core/trace.h"

namespace preflash {

namespace py = pybind11;

void bind_trace(py::module_& m) {
  m.attr("item_record_bytes") = sizeof(ItemRecord);
  py::class_<Trace>(m, "Trace")
      .def(py::init([](Address records, std::int64_t capacity, int device) {
             return std::make_unique<Trace>(pointer<ItemRecord>(records), capacity, device);
           }),
           py::arg("records"), py::arg("capacity"), py::arg("device"))
      .def("start", &Trace::start)
      .def("stop", &Trace::stop)
      .def_property_readonly("launches", [](const Trace& trace) {
        py::list launches;
        for (const TracedLaunch& launch : trace.launches()) {
          launches.append(
              py::make_tuple(launch.kernel_id, launch.first_record, launch.num_records));
        }
        return launches;
      });
}

}  // namespace preflash
