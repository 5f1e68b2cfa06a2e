#include "bindings/workspace.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "bindings/execution_plan.h"
#include "bindings/run_memory.h"
#include "core/device.h"

namespace preflash {

namespace py = pybind11;

namespace {

constexpr std::int64_t kSmallestIntBuffer = 64 * 1024;
constexpr std::size_t kBuffersKept = 8;

}  // namespace

DeviceStream::DeviceStream(std::shared_ptr<const Torch> torch, py::object python)
    : torch_(std::move(torch)),
      python_(std::move(python)),
      ordinal_(python_.attr("ordinal").cast<int>()) {}

void* DeviceStream::current() const {
  if (!on_gpu()) return nullptr;
  if (const auto stream = torch_->current_stream(ordinal_)) return *stream;
  return pointer<void>(python_.attr("stream")().cast<Address>());  // an older torch
}

bool DeviceStream::is_capturing() const {
  return services_of(ordinal_).is_capturing({.device = ordinal_, .stream = current()});
}

void DeviceStream::wait_for(void* stream) const {
  const LaunchTarget target{.device = ordinal_, .stream = current()};
  check_launch(services_of(ordinal_).order_behind(stream, target), "plan()");
}

Buffer::Buffer(py::object tensor, std::optional<void*> owner)
    : tensor_(std::move(tensor)),
      bytes_(tensor_.attr("nbytes").cast<std::int64_t>()),
      on_gpu_(tensor_.attr("is_cuda").cast<bool>()),
      owner_known_(owner.has_value()) {
  if (owner) streams_.push_back(*owner);
}

std::shared_ptr<Buffer> Buffer::allocate(std::int64_t bytes, const DeviceStream& device_stream) {
  const py::module_ module = py::module_::import("torch");
  py::object tensor =
      module.attr("empty")(bytes, py::arg("dtype") = module.attr("uint8"),
                           py::arg("device") = device_stream.python().attr("device"));
  return std::make_shared<Buffer>(std::move(tensor), device_stream.current());
}

bool Buffer::is_free_on(void* stream) const {
  const std::lock_guard lock(guard_);
  return !on_gpu_ || (owner_known_ && streams_ == std::vector{stream});
}

void Buffer::used_on(const DeviceStream& device_stream, void* stream) {
  if (!on_gpu_) return;
  {
    const std::lock_guard lock(guard_);
    if (std::ranges::find(streams_, stream) != streams_.end()) return;
  }
  tensor_.attr("record_stream")(device_stream.python().attr("owner_stream")());
  const std::lock_guard lock(guard_);
  streams_.push_back(stream);
}

void Buffer::add_streams(std::set<void*>* streams) const {
  const std::lock_guard lock(guard_);
  streams->insert(streams_.begin(), streams_.end());
}

void order_behind_users(const std::vector<std::shared_ptr<Buffer>>& buffers,
                        const DeviceStream& device_stream) {
  std::set<void*> streams;
  for (const auto& buffer : buffers) buffer->add_streams(&streams);
  streams.erase(device_stream.current());
  for (void* stream : streams) device_stream.wait_for(stream);
}

Workspace::Workspace(std::shared_ptr<const RunFunctions> functions, py::object device_stream,
                     py::object float_buffer, py::object int_buffer)
    : functions_(std::move(functions)),
      device_stream_(functions_->torch, std::move(device_stream)) {
  if (!float_buffer.is_none()) {
    float_buffer_ = std::make_shared<Buffer>(std::move(float_buffer));
  }
  if (!int_buffer.is_none()) given_ = std::make_shared<Buffer>(std::move(int_buffer));
}

py::object Workspace::float_tensor() const {
  return float_buffer_ == nullptr ? py::none() : float_buffer_->tensor();
}

std::int64_t Workspace::float_bytes() const {
  if (float_bytes_) return *float_bytes_;
  if (float_buffer_ == nullptr) return 0;
  return memory_of(torch(), "float_workspace_buffer", float_buffer_->tensor()).bytes;
}

std::optional<std::int64_t> Workspace::int_room() const {
  if (given_ == nullptr) return {};
  return memory_of(torch(), "int_workspace_buffer", given_->tensor()).bytes;
}

std::shared_ptr<Workspace> Workspace::beside() {
  if (given_ == nullptr) return shared_from_this();
  auto other =
      std::make_shared<Workspace>(functions_, device_stream_.python(), py::none(), py::none());
  other->float_buffer_ = float_buffer_;
  other->float_bytes_ = float_bytes_;
  other->uploader_ = uploader();
  return other;
}

std::shared_ptr<Buffer> Workspace::int_buffer(std::int64_t bytes) {
  if (given_ != nullptr) return given_;
  std::pair<std::shared_ptr<Buffer>, std::weak_ptr<ExecutionPlan>> spare;
  {
    const std::lock_guard lock(guard_);
    spare.swap(spare_);
  }
  const auto& [buffer, user] = spare;
  if (buffer != nullptr && user.expired() && buffer->bytes() >= bytes &&
      buffer->is_free_on(device_stream_.current())) {
    return buffer;
  }
  const std::int64_t room = std::max(bytes + bytes / 4, kSmallestIntBuffer);
  return Buffer::allocate(room, device_stream_);
}

void Workspace::give_back(const std::shared_ptr<ExecutionPlan>& variant) {
  if (given_ != nullptr) return;
  std::pair<std::shared_ptr<Buffer>, std::weak_ptr<ExecutionPlan>> spare{
      variant->plan_buffer()->buffer, variant};
  const std::lock_guard lock(guard_);
  spare.swap(spare_);
}

std::shared_ptr<Buffer> Workspace::buffer_of(const py::object& tensor) {
  const std::pair key{tensor.ptr(), torch().address_of(tensor.ptr())};
  {
    const std::lock_guard lock(guard_);
    if (const auto found = lent_.find(key); found != lent_.end()) return found->second;
  }
  const auto made = std::make_shared<Buffer>(tensor);
  decltype(lent_) dropped;  // once others may go on
  const std::lock_guard lock(guard_);
  if (lent_.size() >= kBuffersKept) dropped.swap(lent_);
  lent_[key] = made;
  return made;
}

std::shared_ptr<Uploader> Workspace::known_uploader() const {
  const std::lock_guard lock(guard_);
  return uploader_;
}

std::shared_ptr<Uploader> Workspace::uploader() {
  if (auto known = known_uploader()) return known;
  auto made = std::make_shared<Uploader>(device_stream_.ordinal());
  const std::lock_guard lock(guard_);
  if (uploader_ == nullptr) uploader_.swap(made);
  return uploader_;
}

std::shared_ptr<RunSettings> Workspace::settings_for(const ExecutionPlan& variant) {
  auto alike = variant.alike();
  {
    const std::lock_guard lock(guard_);
    if (settings_ != nullptr && settings_->of == alike) return settings_;
  }
  auto made = std::make_shared<RunSettings>(float_tensor(), std::move(alike));
  auto result = made;
  const std::lock_guard lock(guard_);
  settings_.swap(made);
  return result;
}

void add_copy(const Workspace& workspace, const ArrayForBuffer& given,
              std::vector<HostCopy>* copies) {
  const Torch& torch = workspace.torch();
  const auto to = torch.read(given.buffer.ptr()), from = torch.read(given.array.ptr());
  const bool flat = to && from && from->ndim == 1 && (from->strides[0] == 1 || from->shape[0] <= 1);
  const auto like = [](const dlpack::Tensor& a, const dlpack::Tensor& b) {
    return a.ndim == b.ndim && std::equal(a.strides, a.strides + a.ndim, b.strides);
  };
  if (to && from && from->device == to->device && from->address() == to->address() &&
      (flat || like(*to, *from))) {
    return;
  }
  if (!flat || from->device.type != dlpack::kCpu) {
    workspace.functions()->copy(given.buffer, given.array, given.most);
    return;
  }
  const std::int64_t elements = std::min(from->shape[0], given.most);
  copies->push_back({.to = pointer<void>(to->address()),
                     .from = pointer<const void>(from->address()),
                     .bytes = static_cast<std::size_t>(elements) * sizeof(std::int32_t)});
}

void bind_workspace(py::module_& m) {
  py::class_<RunFunctions, std::shared_ptr<RunFunctions>>(m, "RunFunctions")
      .def(py::init([](std::shared_ptr<const Torch> torch, const py::kwargs& functions) {
             return std::make_shared<RunFunctions>(RunFunctions{.torch = std::move(torch),
                                                                .check = functions["check"],
                                                                .refuse = functions["refuse"],
                                                                .convert = functions["convert"],
                                                                .copy = functions["copy"],
                                                                .to_host = functions["to_host"]});
           }),
           py::arg("torch"));
  py::class_<Buffer, std::shared_ptr<Buffer>>(m, "Buffer")
      .def_property_readonly("tensor", &Buffer::tensor)
      .def_property_readonly("num_bytes", &Buffer::bytes);
  py::class_<Workspace, std::shared_ptr<Workspace>>(m, "Workspace")
      .def(py::init<std::shared_ptr<const RunFunctions>, py::object, py::object, py::object>(),
           py::arg("functions"), py::arg("device_stream"), py::arg("float_buffer") = py::none(),
           py::arg("int_buffer") = py::none())
      .def_property_readonly(
          "device_stream",
          [](const Workspace& workspace) { return workspace.device_stream().python(); })
      .def_property_readonly("float_tensor", &Workspace::float_tensor)
      .def_property("float_bytes", &Workspace::float_bytes, &Workspace::set_float_bytes)
      .def_property_readonly("int_room",
                             [](const Workspace& workspace) -> py::object {
                               const auto room = workspace.int_room();
                               return room ? py::object(py::int_(*room)) : py::none();
                             })
      .def_property_readonly("known_uploader", &Workspace::known_uploader)
      .def("beside", &Workspace::beside)
      .def("allocate",
           [](const Workspace& workspace, std::int64_t bytes) {
             return Buffer::allocate(bytes, workspace.device_stream());
           })
      .def("plan_buffer",
           [](Workspace& workspace, std::shared_ptr<Buffer> buffer) {
             return std::make_shared<PlanBuffer>(workspace.uploader(), workspace.functions()->torch,
                                                 std::move(buffer));
           })
      .def("give_back", &Workspace::give_back);
}

}  // namespace preflash
