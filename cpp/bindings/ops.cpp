// packbits, merge_state and append_paged_kv_cache for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "core/device.h"
#include "preflash/params.h"

namespace preflash {
namespace {

namespace py = pybind11;

void pack_bits(const PackBitsParams& params, const LaunchTarget& target) {
  py::gil_scoped_release release;
  check_launch(services_of(target.device).pack_bits(params, target), "packbits");
}

void merge(const MergeStatesParams& params, const LaunchTarget& target) {
  py::gil_scoped_release release;
  check_launch(services_of(target.device).merge_states(params, target), "merge_states");
}

using IndexNumbers = std::tuple<Address, std::int64_t, std::int64_t, int>;

IndexArray index_array(const IndexNumbers& numbers) {
  const auto [data, count, stride, bytes] = numbers;
  if (bytes != 4 && bytes != 8) throw py::value_error("an index has 4 or 8 bytes");
  return {.data = pointer<const void>(data),
          .count = count,
          .stride = stride,
          .width = static_cast<IndexWidth>(bytes)};
}

using RowNumbers = std::tuple<Address, std::int64_t, std::int64_t>;
using PoolNumbers = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;

AppendedRows appended_rows(const RowNumbers& rows, const PoolNumbers& pool, int num_heads,
                           int row_bytes) {
  const auto [from, rows_token, rows_head] = rows;
  const auto [to, pool_page, pool_slot, pool_head] = pool;
  return {.rows = pointer<const std::uint8_t>(from),
          .pool = pointer<std::uint8_t>(to),
          .rows_token = rows_token,
          .rows_head = rows_head,
          .pool_page = pool_page,
          .pool_slot = pool_slot,
          .pool_head = pool_head,
          .num_heads = num_heads,
          .row_bytes = row_bytes};
}

void append_paged_kv(const AppendParams& params, const LaunchTarget& target) {
  py::gil_scoped_release release;
  check_launch(services_of(target.device).append_paged_kv(params, target), "append_paged_kv_cache");
}

}  // namespace

void bind_ops(py::module_& m) {
  py::class_<LaunchTarget>(m, "LaunchTarget")
      .def(py::init([](int device, Address stream, int num_threads) {
             check_num_threads(num_threads);
             return LaunchTarget{
                 .device = device, .stream = pointer<void>(stream), .num_threads = num_threads};
           }),
           py::arg("device"), py::arg("stream"), py::arg("num_threads"));
  py::class_<PackBitsParams>(m, "PackBitsParams")
      .def(py::init([](bool little) { return PackBitsParams{.little = little}; }),
           py::arg("little"))
      .def("set_arrays",
           [](PackBitsParams& params, Address x, Address packed) {
             params.x = pointer<const std::uint8_t>(x);
             params.packed = pointer<std::uint8_t>(packed);
           })
      .def("set_segments",
           [](PackBitsParams& params, Address begins, int num_segments) {
             params.in_begin = pointer<const std::int64_t>(begins);
             params.out_begin = params.in_begin + num_segments + 1;
             params.num_segments = num_segments;
           })
      .def("launch", &pack_bits, py::arg("target"));
  py::class_<MergeStatesParams>(m, "MergeStatesParams")
      .def(py::init([](DType dtype, int num_states, std::tuple<std::int64_t, int, int> shape) {
             const auto [num_tokens, num_heads, head_dim] = shape;
             return MergeStatesParams{.dtype = dtype,
                                      .num_tokens = num_tokens,
                                      .num_states = num_states,
                                      .num_heads = num_heads,
                                      .head_dim = head_dim};
           }),
           py::arg("dtype"), py::arg("num_states"), py::arg("shape"))
      .def("set_inputs",
           [](MergeStatesParams& params, Address v_a, Address s_a, Address v_b, Address s_b) {
             params.v[0] = pointer<const void>(v_a);
             params.s[0] = pointer<const float>(s_a);
             params.v[1] = pointer<const void>(v_b);
             params.s[1] = pointer<const float>(s_b);
           })
      .def("set_outputs",
           [](MergeStatesParams& params, Address v, Address s, Address token_mask) {
             params.v_out = pointer<void>(v);
             params.s_out = pointer<float>(s);
             params.token_mask = pointer<const std::uint8_t>(token_mask);
           })
      .def("launch", &merge, py::arg("target"));
  py::class_<AppendParams>(m, "AppendParams",
                           "Addresses, counts and strides (of arrays in elements, else bytes)")
      .def(py::init([](std::int64_t num_tokens, std::int64_t num_pages, int page_size) {
             return AppendParams{
                 .num_tokens = num_tokens, .num_pages = num_pages, .page_size = page_size};
           }),
           py::arg("num_tokens"), py::arg("num_pages"), py::arg("page_size"))
      .def("set_k",
           [](AppendParams& params, const RowNumbers& rows, const PoolNumbers& pool, int num_heads,
              int row_bytes) { params.k = appended_rows(rows, pool, num_heads, row_bytes); })
      .def("set_v",
           [](AppendParams& params, const RowNumbers& rows, const PoolNumbers& pool, int num_heads,
              int row_bytes) { params.v = appended_rows(rows, pool, num_heads, row_bytes); })
      .def("set_places",
           [](AppendParams& params, const IndexNumbers& batch_indices,
              const IndexNumbers& positions) {
             params.batch_indices = index_array(batch_indices);
             params.positions = index_array(positions);
           })
      .def("set_page_table",
           [](AppendParams& params, const IndexNumbers& indices, const IndexNumbers& indptr,
              std::pair<std::int64_t, std::int64_t> row) {
             params.page_indices = index_array(indices);
             params.page_indptr = index_array(indptr);
             std::tie(params.table_width, params.table_stride) = row;
           })
      .def("launch", &append_paged_kv, py::arg("target"));
}

}  // namespace preflash
