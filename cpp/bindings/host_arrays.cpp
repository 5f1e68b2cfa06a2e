#include "bindings/host_arrays.h"

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
  const py::module_ module = py::module_::import("torch");
  tensor_type = module.attr("Tensor");
  int32 = module.attr("int32");
  dtype = py::str("dtype");
  is_cpu = py::str("is_cpu");
  dim = tensor_type.attr("dim");
  is_contiguous = tensor_type.attr("is_contiguous");
  is_neg = tensor_type.attr("is_neg");
  data_ptr = tensor_type.attr("data_ptr");
  storage_offset = tensor_type.attr("storage_offset");
  numel = tensor_type.attr("numel");
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
  const std::optional<dlpack::Tensor> tensor = torch.read(value);
  if (!tensor || tensor->ndim != 1 || !(tensor->device == device) ||
      !(tensor->dtype == dlpack::kInt32) || (tensor->strides[0] != 1 && tensor->shape[0] > 1)) {
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
std::optional<Indices> elements(const HostArrays& torch, PyObject* value, dlpack::Device device) {
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

// The GPU of page indices that are not on the host: that of a graph's buffer for them, or of the
// wrapper's uploads.
std::optional<dlpack::Device> gpu_of(const std::optional<dlpack::Tensor>& buffer,
                                     const Uploader* uploader) {
  if (buffer) return buffer->device;
  if (uploader == nullptr || uploader->device() == kCpuDevice) return {};
  return dlpack::Device{.type = dlpack::kCuda, .id = uploader->device()};
}

// Gives the batch its page indices; those on the host it takes over, unless a graph's buffer gets
// them. False: the form is another, or the buffer is too small.
bool attach_pages(const HostArrays& torch, const GivenArrays& given, BatchOfArrays* found) {
  Batch& batch = *found->batch;
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

bool has_kv_lens(const HostArrays& torch, PyObject* given, const Batch& batch) {
  const auto lengths = elements(torch, given, kHost);
  if (!lengths || std::ssize(*lengths) != batch.num_requests()) return false;
  for (int i = 0; i < batch.num_requests(); ++i) {
    if ((*lengths)[i] != batch.kv_len(i)) return false;
  }
  return true;
}

namespace {

// (qo_indptr, kv_indptr, page_indices, last_page_len, page_size, uploader, buffer of page indices):
// tensors but for page_size and an uploader; the last two may be None. page_size 0: ragged, without
// tensors of pages. Returns (batch, pages): the largest page on the host; True: the pages are on
// the GPU; None: ragged, or pages of another form.
py::object batch_of(const HostArrays& torch, PyObject* const* given) {
  const auto found =
      batch_of_usual(torch, {.qo_indptr = given[0],
                             .kv_indptr = given[1],
                             .indices = given[2],
                             .last_page_len = given[3],
                             .page_size = static_cast<int>(PyLong_AsLong(given[4])),
                             .uploader = py::handle(given[5]).cast<const Uploader*>(),
                             .indices_buffer = given[6] == Py_None ? nullptr : given[6]});
  if (!found) return py::none();
  py::object pages = py::none();
  if (found->pages_on_gpu) {
    pages = py::bool_(true);
  } else if (found->has_pages) {
    pages = py::int_(found->largest_page);
  }
  return py::make_tuple(found->batch, std::move(pages));
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
  constexpr Py_ssize_t kArguments = 7;
  if (count != kArguments) {
    return PyErr_Format(PyExc_TypeError, "a paged batch takes %zd arguments, not %zd", kArguments,
                        count);
  }
  return none_if_unusual([&] { return batch_of(state_of<HostArrays>(self), given); });
}

PyMethodDef paged_batch_definition =
    fast_definition("paged_batch", &paged_batch, "(Batch, pages) of usual arrays, or None.");

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
  auto bind = [&](const char* name, PyMethodDef& definition) {
    m.def(
        name,
        [&definition](std::shared_ptr<const Torch> torch) {
          return fast_callable(definition, HostArrays(std::move(torch)));
        },
        py::arg("torch"));
  };
  bind("paged_batches", paged_batch_definition);
  bind("page_lengths_of", page_lengths_definition);
  m.def("debugging", &debugging);
}

}  // namespace preflash
