// The index arrays of plan() in their usual form: contiguous one-dimensional int32 tensors on the
// CPU. Python handles all others, and says what is wrong with them.
#include <cstdlib>
#include <limits>
#include <memory>
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
namespace {

namespace py = pybind11;

using Indices = std::span<const std::int32_t>;

// True under PREFLASH_DEBUG=1, which also checks values on the GPU, with a wait for it.
bool debugging() {
  const char* const value = std::getenv("PREFLASH_DEBUG");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

// torch's methods, called as from Python, for what the protocol's table does not tell.
struct HostArrays {
  std::shared_ptr<const Torch> torch;
  py::object tensor_type;
  py::object int32;
  py::object dtype, is_cpu;  // names
  // Methods.
  py::object dim, is_contiguous, is_neg, data_ptr;
  py::object storage_offset, numel, untyped_storage;

  HostArrays(std::shared_ptr<const Torch> torch, const py::object& tensor_type,
             const py::object& int32)
      : torch(std::move(torch)),
        tensor_type(tensor_type),
        int32(int32),
        dtype(py::str("dtype")),
        is_cpu(py::str("is_cpu")),
        dim(tensor_type.attr("dim")),
        is_contiguous(tensor_type.attr("is_contiguous")),
        is_neg(tensor_type.attr("is_neg")),
        data_ptr(tensor_type.attr("data_ptr")),
        storage_offset(tensor_type.attr("storage_offset")),
        numel(tensor_type.attr("numel")),
        untyped_storage(tensor_type.attr("untyped_storage")) {}
};

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

py::object attribute(const py::object& name, PyObject* tensor) {
  PyObject* result = PyObject_GetAttr(tensor, name.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

Indices indices_at(Address data, std::int64_t count) {
  return Indices(pointer<const std::int32_t>(data), static_cast<std::size_t>(count));
}

constexpr dlpack::Device kHost = {.type = dlpack::kCpu, .id = 0};

std::optional<Indices> by_table(const Torch& torch, PyObject* value, dlpack::Device device) {
  constexpr dlpack::DataType kInt32 = {.code = dlpack::kInt, .bits = 32, .lanes = 1};
  const std::optional<dlpack::Tensor> tensor = torch.read(value);
  if (!tensor || tensor->ndim != 1 || !(tensor->device == device) || !(tensor->dtype == kInt32) ||
      (tensor->strides[0] != 1 && tensor->shape[0] > 1)) {
    return {};
  }
  return indices_at(tensor->address(), tensor->shape[0]);
}

std::optional<Indices> by_methods(const HostArrays& torch, PyObject* value) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != torch.tensor_type.ptr()) return {};
  if (!attribute(torch.dtype, value).is(torch.int32)) return {};
  if (integer(torch.dim, value) != 1) return {};
  if (attribute(torch.is_cpu, value).ptr() != Py_True) return {};
  if (call(torch.is_contiguous, value).ptr() != Py_True) return {};
  return indices_at(integer(torch.data_ptr, value), integer(torch.numel, value));
}

// The elements of a usual array on a device. A storage that is too small was freed.
std::optional<Indices> elements(const HostArrays& torch, PyObject* value,
                                dlpack::Device device = kHost) {
  const bool reads = torch.torch->reads();
  if (!reads && !(device == kHost)) return {};
  const std::optional<Indices> found =
      reads ? by_table(*torch.torch, value, device) : by_methods(torch, value);
  if (!found || found->data() == nullptr) return {};
  if (call(torch.is_neg, value).ptr() != Py_False) return {};
  const std::int64_t end = integer(torch.storage_offset, value) + std::ssize(*found);
  const Py_ssize_t bytes = PyObject_Size(call(torch.untyped_storage, value).ptr());
  if (bytes < 0) throw py::error_already_set();
  if (end * std::int64_t{sizeof(std::int32_t)} > bytes) return {};
  return found;
}

constexpr Py_ssize_t kArguments = 7;

// The GPU of page indices that are not on the host: that of a graph's buffer for them, or of the
// wrapper's uploads.
std::optional<dlpack::Device> gpu_of(const std::optional<dlpack::Tensor>& buffer,
                                     const Uploader* uploader) {
  if (buffer) return buffer->device;
  if (uploader == nullptr || uploader->device() == kCpuDevice) return {};
  return dlpack::Device{.type = dlpack::kCuda, .id = uploader->device()};
}

// Checks page indices in the usual form. Returns the largest of the first `used` indices on the
// host, which the batch takes over unless a graph's buffer gets them; True for indices on the GPU,
// which are not read. Returns None if the form is another, or the buffer is too small.
py::object attach_pages(const HostArrays& torch, PyObject* given, const Uploader* uploader,
                        PyObject* buffer, Batch& batch) {
  const std::int32_t used = batch.kv_end();
  std::optional<dlpack::Tensor> into_buffer;
  if (buffer != Py_None) {
    into_buffer = torch.torch->read(buffer);
    if (!into_buffer || into_buffer->ndim != 1 || used > into_buffer->shape[0]) return py::none();
  }
  const auto holds = [used](const std::optional<Indices>& pages) {
    return pages && used >= 0 && used <= std::ssize(*pages);
  };
  std::optional<Indices> pages = elements(torch, given);
  if (!holds(pages)) {
    const auto gpu = gpu_of(into_buffer, uploader);
    if (!gpu || *gpu == kHost || debugging()) return py::none();
    return holds(elements(torch, given, *gpu)) ? py::object(py::bool_(true)) : py::none();
  }
  if (into_buffer) return py::int_(batch.largest_page_of(pages->data(), used));
  std::shared_ptr<PageArray> into;
  if (uploader != nullptr && PageMemory::pays_for(used)) {
    into = uploader->page_memory().find(used);
    if (into == nullptr) {
      into = make_page_array(*uploader, used);
      pages = elements(torch, given);  // other threads may have been at it
      if (!holds(pages)) return py::none();
    }
  }
  return py::int_(batch.set_page_indices(pages->data(), used, std::move(into)));
}

// (qo_indptr, kv_indptr, page_indices, last_page_len, page_size, uploader, buffer of page indices):
// tensors but for page_size and an uploader; the last two may be None. page_size 0: ragged, without
// tensors of pages.
py::object batch_of(const HostArrays& torch, PyObject* const* given) {
  const int page_size = static_cast<int>(PyLong_AsLong(given[4]));
  const bool paged = page_size > 0;
  std::optional<Indices> arrays[3];
  const auto* uploader = py::handle(given[5]).cast<const Uploader*>();
  std::vector<std::int32_t> ones;
  for (int i = 0; i < (paged ? 3 : 2); ++i) {
    PyObject* const array = given[i == 2 ? 3 : i];
    arrays[i] = elements(torch, array);
    if (!arrays[i] && i == 2 && page_size == 1 && !debugging()) {
      // A page of one token holds one: no wait to hear it from the GPU.
      const auto gpu = gpu_of(torch.torch->read(given[6]), uploader);
      if (!gpu || *gpu == kHost) return py::none();
      const auto remote = elements(torch, array, *gpu);
      if (!remote) return py::none();
      ones.assign(remote->size(), 1);
      arrays[i] = ones;
    }
    if (!arrays[i]) return py::none();
  }
  const auto& [qo_indptr, kv_indptr, last_page_len] = arrays;
  const std::size_t size = qo_indptr->size();
  if (size == 0 || size > std::numeric_limits<int>::max() || kv_indptr->size() != size ||
      (paged && last_page_len->size() + 1 != size)) {
    return py::none();
  }
  auto batch =
      std::make_shared<Batch>(BatchArrays{.qo_indptr = qo_indptr->data(),
                                          .kv_indptr = kv_indptr->data(),
                                          .last_page_len = paged ? last_page_len->data() : nullptr,
                                          .num_requests = static_cast<int>(size) - 1,
                                          .page_size = page_size});
  py::object largest = py::none();
  if (paged) {
    largest = attach_pages(torch, given[2], uploader, given[6], *batch);
  }
  return py::make_tuple(std::move(batch), std::move(largest));
}

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

PyObject* paged_batch(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != kArguments) {
    return PyErr_Format(PyExc_TypeError, "a paged batch takes %zd arguments, not %zd", kArguments,
                        count);
  }
  return none_if_unusual([&] { return batch_of(state_of<HostArrays>(self), given); });
}

PyMethodDef paged_batch_definition = fast_definition(
    "paged_batch", &paged_batch, "(Batch, what attach_pages() says) of usual arrays, or None.");

// (kv_indptr, last_page_len, page_size): a list of the requests' lengths, or None where an array is
// unusual or a value wrong.
py::object lengths_of(const HostArrays& torch, PyObject* const* given) {
  const std::int64_t page_size = PyLong_AsLongLong(given[2]);
  if (page_size < 1) {  // page.py has checked it: more than 64 bits have
    PyErr_Clear();
    return py::none();
  }
  const std::optional<Indices> indptr = elements(torch, given[0]);
  const std::optional<Indices> last_page_len = elements(torch, given[1]);
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
  auto bind = [&](const char* name, PyMethodDef& definition) {
    m.def(
        name,
        [&definition](std::shared_ptr<const Torch> torch, const py::object& tensor_type,
                      const py::object& int32) {
          return fast_callable(definition, HostArrays(std::move(torch), tensor_type, int32));
        },
        py::arg("torch"), py::arg("tensor_type"), py::arg("int32"));
  };
  bind("paged_batches", paged_batch_definition);
  bind("page_lengths_of", page_lengths_definition);
  m.def("debugging", &debugging);
}

}  // namespace preflash
