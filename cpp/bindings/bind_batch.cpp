// A batch's lengths for Python.
#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <utility>

#include "bindings/bindings.h"
#include "core/batch.h"
#include "core/device_plan.h"

namespace preflash {

namespace py = pybind11;

namespace {

template <class T>
py::list list_of(std::span<const T> values) {
  py::list list;
  for (T value : values) list.append(value);
  return list;
}

}  // namespace

std::shared_ptr<PageArray> make_page_array(const Uploader& uploader, std::int64_t count) {
  py::gil_scoped_release release;
  return uploader.page_memory().make(count);
}

void bind_batch(py::module_& m) {
  py::class_<BatchArrays>(m, "BatchArrays")
      .def(py::init(
               [](Address qo_indptr, Address kv_indptr, Address last_page_len, int num_requests) {
                 return BatchArrays{.qo_indptr = pointer<const std::int32_t>(qo_indptr),
                                    .kv_indptr = pointer<const std::int32_t>(kv_indptr),
                                    .last_page_len = pointer<const std::int32_t>(last_page_len),
                                    .num_requests = num_requests};
               }),
           py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("last_page_len"),
           py::arg("num_requests"));
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def(py::init([](BatchArrays arrays, int page_size, bool lengths_are_upper_bounds) {
             arrays.page_size = page_size;
             arrays.lengths_are_upper_bounds = lengths_are_upper_bounds;
             return std::make_shared<Batch>(arrays);
           }),
           py::arg("arrays"), py::arg("page_size"), py::arg("lengths_are_upper_bounds") = false)
      .def_property_readonly("num_requests", &Batch::num_requests)
      .def_property_readonly("page_size", &Batch::page_size)
      // True: both queries and keys. plan()'s option of this name: kv_lengths_are_upper_bounds.
      .def_property_readonly("lengths_are_upper_bounds", &Batch::lengths_are_upper_bounds)
      .def("use_block_table", &Batch::use_block_table, py::arg("row_stride"))
      .def_property_readonly("page_entries", &Batch::page_entries)
      .def("use_kv_upper_bounds", &Batch::use_kv_upper_bounds)
      .def_property_readonly("kv_lengths_are_upper_bounds", &Batch::kv_lengths_are_upper_bounds)
      .def("may_leave_rows", &Batch::may_leave_rows, py::arg("q_rows"))
      .def("require_exact_rows", &Batch::require_exact_rows)
      .def_property_readonly("exact_rows", &Batch::exact_rows)
      .def_property_readonly("qo_begin", &Batch::qo_begin)
      .def_property_readonly("kv_begin", &Batch::kv_begin)
      .def_property_readonly("qo_end", &Batch::qo_end)
      .def_property_readonly("kv_end", &Batch::kv_end)
      .def_property_readonly("max_qo_len", &Batch::max_qo_len)
      .def_property_readonly("max_kv_len", &Batch::max_kv_len)
      .def_property_readonly("qo_indptr",
                             [](const Batch& batch) { return list_of(batch.qo_indptr()); })
      .def_property_readonly("kv_indptr",
                             [](const Batch& batch) { return list_of(batch.kv_indptr()); })
      .def_property_readonly("last_page_len",
                             [](const Batch& batch) { return list_of(batch.last_page_len()); })
      .def_property_readonly("mask_indptr",
                             [](const Batch& batch) { return list_of(batch.mask_indptr()); })
      .def("qo_len", &Batch::qo_len)
      .def("kv_len", &Batch::kv_len)
      .def("use_mask", &Batch::use_mask)
      .def("with_mask",
           [](const Batch& batch) {
             auto masked = std::make_shared<Batch>(batch);
             masked->use_mask();
             return masked;
           })
      .def_property_readonly("mask_elements", &Batch::mask_elements)
      .def_property_readonly("mask_bytes", &Batch::mask_bytes)
      .def("write_mask_segments",
           [](const Batch& batch, Address begin) {
             batch.write_mask_segments(pointer<std::int64_t>(begin));
           })
      .def(
          "set_page_indices",
          [](Batch& batch, Address indices, std::int64_t count, const Uploader* uploader) {
            std::shared_ptr<PageArray> into;
            if (uploader != nullptr && PageMemory::pays_for(count)) {
              into = uploader->page_memory().find(count);
              if (into == nullptr) into = make_page_array(*uploader, count);
            }
            return batch.set_page_indices(pointer<const std::int32_t>(indices), count,
                                          std::move(into));
          },
          py::arg("indices"), py::arg("count"), py::arg("uploader") = nullptr)
      .def("largest_page_of",
           [](const Batch& batch, Address indices, std::int64_t count) {
             return batch.largest_page_of(pointer<const std::int32_t>(indices), count);
           })
      .def_property_readonly("page_indices",
                             [](const Batch& batch) { return list_of(batch.page_indices()); })
      .def("first_qo_len_other_than",
           [](const Batch& batch, Address lengths) {
             return batch.first_qo_len_other_than(pointer<const std::int64_t>(lengths));
           })
      .def("first_kv_len_other_than",
           [](const Batch& batch, Address lengths) {
             return batch.first_kv_len_other_than(pointer<const std::int64_t>(lengths));
           })
      .def("first_pages_other_than", [](const Batch& batch, Address page_indices,
                                        Address block_tables, std::int64_t row_stride) {
        return batch.first_pages_other_than(
            pointer<const std::int32_t>(page_indices),
            {.data = pointer<const std::int32_t>(block_tables), .row_stride = row_stride});
      });
}

}  // namespace preflash
