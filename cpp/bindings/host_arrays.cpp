#include "bindings/host_arrays.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fast_call.h"
#include "bindings/torch_tensors.h"
#include "core/batch.h"
#include "core/device_plan.h"

namespace preflash {

namespace py = pybind11;

bool debugging() {
  const char* const value = std::getenv("PREFLASH_DEBUG");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

HostArrays::HostArrays(std::shared_ptr<const Torch> of) : torch(std::move(of)) {
  const py::object tensor_type = py::module_::import("torch").attr("Tensor");
  is_neg = tensor_type.attr("is_neg");
  storage_offset = tensor_type.attr("storage_offset");
  untyped_storage = tensor_type.attr("untyped_storage");
}

namespace {

using Indices = std::span<const std::int32_t>;

py::object call(const py::object& method, PyObject* tensor) {
  PyObject* result = PyObject_Vectorcall(method.ptr(), &tensor, 1, nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

std::int64_t integer(const py::object& method, PyObject* tensor) {
  const long long value = PyLong_AsLongLong(call(method, tensor).ptr());
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

constexpr dlpack::Device kHost = {.type = dlpack::kCpu, .id = 0};

// True if the tensor has its memory, as it is up to its last element. A storage that is too small
// was freed.
bool is_backed(const HostArrays& torch, PyObject* value, std::int64_t elements) {
  if (call(torch.is_neg, value).ptr() != Py_False) return false;
  const std::int64_t end = integer(torch.storage_offset, value) + elements;
  const Py_ssize_t bytes = PyObject_Size(call(torch.untyped_storage, value).ptr());
  if (bytes < 0) throw py::error_already_set();
  return end * std::int64_t{sizeof(std::int32_t)} <= bytes;
}

// The elements of a usual array on a device.
std::optional<Indices> elements(const HostArrays& torch, PyObject* value, dlpack::Device device) {
  const std::optional<dlpack::Tensor> tensor = torch.torch->read(value);
  if (!tensor || tensor->ndim != 1 || !(tensor->device == device) ||
      !(tensor->dtype == dlpack::kInt32) || (tensor->strides[0] != 1 && tensor->shape[0] > 1) ||
      tensor->address() == 0 || !is_backed(torch, value, tensor->shape[0])) {
    return {};
  }
  return Indices(pointer<const std::int32_t>(tensor->address()),
                 static_cast<std::size_t>(tensor->shape[0]));
}

// The GPU of page indices that are not on the host: that of a graph's buffer for them, or of the
// wrapper's uploads.
std::optional<dlpack::Device> gpu_of(const std::optional<dlpack::Tensor>& buffer,
                                     const Uploader* uploader) {
  if (buffer) return buffer->device;
  if (uploader == nullptr || uploader->device() == kCpuDevice) return {};
  return dlpack::Device{.type = dlpack::kCuda, .id = uploader->device()};
}

std::int64_t extent_of(const dlpack::Tensor& table) {
  const std::int64_t rows = table.shape[0];
  const std::int64_t width = table.shape[1];
  return rows * width == 0 ? 0 : (rows - 1) * table.strides[0] + width;
}

// Lets the batch read its pages from a block table [num_requests, max_pages] on its device. False:
// the table, or the graph's buffer for it, has another form.
bool attach_table(const HostArrays& torch, const GivenArrays& given, const dlpack::Tensor& table,
                  BatchOfArrays* found) {
  Batch& batch = *found->batch;
  const auto is_table = [&](const dlpack::Tensor& one) {
    return one.ndim == 2 && one.dtype == dlpack::kInt32 && one.device == table.device &&
           one.shape[0] == batch.num_requests() && (one.strides[1] == 1 || one.shape[1] <= 1);
  };
  const std::int64_t most = (batch.max_kv_len() + given.page_size - 1) / given.page_size;
  const bool on_host = table.device == kHost;
  if (given.uploader == nullptr || on_host != (given.uploader->device() == kCpuDevice) ||
      (!on_host && table.device.id != given.uploader->device()) || !is_table(table) ||
      table.shape[1] < most || table.address() == 0 ||
      !is_backed(torch, given.indices, extent_of(table))) {
    return false;
  }
  dlpack::Tensor read = table;
  if (given.indices_buffer != nullptr) {
    const auto buffer = torch.torch->read(given.indices_buffer);
    if (!buffer || !is_table(*buffer) || buffer->shape[1] < table.shape[1]) return false;
    read = *buffer;
  }
  const std::int64_t stride = read.shape[0] > 1 ? read.strides[0] : read.shape[1];
  if (stride > std::numeric_limits<std::int32_t>::max()) return false;
  if (on_host && !given.kv_lengths_are_upper_bounds) {
    const auto* entries = pointer<const std::int32_t>(table.address());
    for (int i = 0; i < batch.num_requests(); ++i) {
      const std::int64_t pages = (batch.kv_len(i) + given.page_size - 1) / given.page_size;
      for (std::int64_t page = 0; page < pages; ++page) {
        const std::int32_t index = entries[i * table.strides[0] + page];
        if (index < 0) return false;
        found->largest_page = std::max<std::int64_t>(found->largest_page, index);
      }
    }
  }
  batch.use_block_table(static_cast<int>(stride));
  found->table_extent = extent_of(read);
  return true;
}

// Gives the batch its page indices; those on the host it takes over, unless a graph's buffer gets
// them. False: the form is another, or the buffer is too small.
bool attach_pages(const HostArrays& torch, const GivenArrays& given, BatchOfArrays* found) {
  Batch& batch = *found->batch;
  if (const auto table = torch.torch->read(given.indices); table && table->ndim == 2) {
    return attach_table(torch, given, *table, found);
  }
  const std::int32_t used = batch.kv_end();
  std::optional<dlpack::Tensor> into_buffer;
  if (given.indices_buffer != nullptr) {
    into_buffer = torch.torch->read(given.indices_buffer);
    if (!into_buffer || into_buffer->ndim != 1 || used > into_buffer->shape[0]) return false;
  }
  const auto holds = [used](const std::optional<Indices>& pages) {
    return pages && used >= 0 && used <= std::ssize(*pages);
  };
  std::optional<Indices> pages = elements(torch, given.indices, kHost);
  if (!holds(pages)) {
    const auto gpu = gpu_of(into_buffer, given.uploader);
    if (!gpu || *gpu == kHost || debugging()) return false;
    found->pages_on_gpu = holds(elements(torch, given.indices, *gpu));
    return found->pages_on_gpu;
  }
  if (into_buffer) {
    found->largest_page = batch.largest_page_of(pages->data(), used);
    return true;
  }
  std::shared_ptr<PageArray> into;
  if (given.uploader != nullptr && PageMemory::pays_for(used)) {
    into = given.uploader->page_memory().find(used);
    if (into == nullptr) {
      into = make_page_array(*given.uploader, used);
      pages = elements(torch, given.indices, kHost);  // other threads may have been at it
      if (!holds(pages)) return false;
    }
  }
  found->largest_page = batch.set_page_indices(pages->data(), used, std::move(into));
  return true;
}

std::vector<std::int32_t> numbers_up_to(std::size_t count) {
  std::vector<std::int32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace

std::optional<BatchOfArrays> batch_of_usual(const HostArrays& torch, const GivenArrays& given) {
  const bool paged = given.page_size > 0;
  if (given.kv_indptr == nullptr ||
      (paged && (given.indices == nullptr || given.last_page_len == nullptr))) {
    return {};
  }
  std::optional<Indices> qo_indptr, kv_indptr = elements(torch, given.kv_indptr, kHost);
  std::optional<Indices> last_page_len;
  std::vector<std::int32_t> ones, numbers;
  if (!kv_indptr) return {};
  if (given.qo_indptr == nullptr) {
    numbers = numbers_up_to(kv_indptr->size());
    qo_indptr = numbers;
  } else {
    qo_indptr = elements(torch, given.qo_indptr, kHost);
  }
  if (!qo_indptr) return {};
  if (paged) {
    last_page_len = elements(torch, given.last_page_len, kHost);
    if (!last_page_len && given.page_size == 1 && !debugging()) {
      // A page of one token holds one: no wait to hear it from the GPU.
      std::optional<dlpack::Tensor> buffer;
      if (given.indices_buffer != nullptr) buffer = torch.torch->read(given.indices_buffer);
      const auto gpu = gpu_of(buffer, given.uploader);
      if (!gpu || *gpu == kHost) return {};
      const auto remote = elements(torch, given.last_page_len, *gpu);
      if (!remote) return {};
      ones.assign(remote->size(), 1);
      last_page_len = ones;
    }
    if (!last_page_len) return {};
  }
  const std::size_t size = qo_indptr->size();
  if (size == 0 || size > std::numeric_limits<int>::max() || kv_indptr->size() != size ||
      (paged && last_page_len->size() + 1 != size)) {
    return {};
  }
  BatchOfArrays found{.batch = std::make_shared<Batch>(
                          BatchArrays{.qo_indptr = qo_indptr->data(),
                                      .kv_indptr = kv_indptr->data(),
                                      .last_page_len = paged ? last_page_len->data() : nullptr,
                                      .num_requests = static_cast<int>(size) - 1,
                                      .page_size = given.page_size})};
  found.has_pages = paged && attach_pages(torch, given, &found);
  return found;
}

namespace {

dlpack::Device device_of(int device) {
  return device == kCpuDevice ? kHost : dlpack::Device{.type = dlpack::kCuda, .id = device};
}

}  // namespace

bool is_usual(const HostArrays& torch, PyObject* given, int device) {
  return elements(torch, given, device_of(device)).has_value();
}

bool is_kv_lens(const HostArrays& torch, PyObject* given, const Batch& batch, int device) {
  const auto lengths = elements(torch, given, device_of(device));
  return lengths && std::ssize(*lengths) == batch.num_requests();
}

bool has_kv_lens(const HostArrays& torch, PyObject* given, const Batch& batch) {
  const auto lengths = elements(torch, given, kHost);
  if (!lengths || std::ssize(*lengths) != batch.num_requests()) return false;
  for (int i = 0; i < batch.num_requests(); ++i) {
    if ((*lengths)[i] != batch.kv_len(i)) return false;
  }
  return true;
}

namespace {

template <class Answer>
PyObject* none_if_unusual(const Answer& answer) {
  try {
    return answer().release().ptr();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_RuntimeError) || error.matches(PyExc_ValueError)) {
      Py_RETURN_NONE;  // no ordinary tensor
    }
    error.restore();
    return nullptr;
  } catch (...) {
    return raise(std::current_exception());
  }
}

// (kv_indptr, last_page_len, page_size): a list of the requests' lengths, or None where an array is
// unusual or a value wrong.
py::object lengths_of(const HostArrays& torch, PyObject* const* given) {
  const std::int64_t page_size = PyLong_AsLongLong(given[2]);
  if (page_size < 1) {  // page.py has checked it: more than 64 bits have
    PyErr_Clear();
    return py::none();
  }
  const std::optional<Indices> indptr = elements(torch, given[0], kHost);
  const std::optional<Indices> last_page_len = elements(torch, given[1], kHost);
  if (!indptr || !last_page_len || last_page_len->size() + 1 != indptr->size()) return py::none();
  py::list lengths(last_page_len->size());
  for (std::size_t i = 0; i < last_page_len->size(); ++i) {
    const std::int64_t begin = (*indptr)[i], pages = (*indptr)[i + 1] - begin;
    const std::int64_t last = (*last_page_len)[i];
    const bool right = begin >= 0 && pages >= 0 &&
                       pages <= std::numeric_limits<std::int32_t>::max() / page_size &&
                       (pages == 0 || (last >= 1 && last <= page_size));
    if (!right) return py::none();
    lengths[i] = pages == 0 ? 0 : (pages - 1) * page_size + last;
  }
  return lengths;
}

PyObject* page_lengths(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 3) {
    return PyErr_Format(PyExc_TypeError, "page lengths take 3 arguments, not %zd", count);
  }
  return none_if_unusual([&] { return lengths_of(state_of<HostArrays>(self), given); });
}

PyMethodDef page_lengths_definition = fast_definition(
    "page_lengths", &page_lengths, "A list of the lengths of a usual, right page table, or None.");

}  // namespace

void bind_host_arrays(py::module_& m) {
  m.def(
      "page_lengths_of",
      [](std::shared_ptr<const Torch> torch) {
        return fast_callable(page_lengths_definition, HostArrays(std::move(torch)));
      },
      py::arg("torch"));
  m.def("debugging", &debugging);
}

}  // namespace preflash
