#include "bindings/plan_buffer.h"

#include <utility>

namespace preflash {

namespace py = pybind11;

PlanBuffer::PlanBuffer(std::shared_ptr<const Uploader> uploader, std::shared_ptr<const Torch> torch,
                       std::shared_ptr<Buffer> of)
    : DevicePlan(std::move(uploader), pointer<void>(torch->address_of(of->tensor().ptr())),
                 of->bytes()),
      torch(std::move(torch)),
      buffer(std::move(of)) {}

void PlanBuffer::check_captured(int segment, const Batch& batch, std::int64_t largest_page) const {
  if (const auto tensors = held()) tensors->check();
  const std::lock_guard lock(guard_);
  if (captured_) (*captured_)[segment].check(batch, largest_page);
}

void PlanBuffer::note_capture(const PerSegment<RunTensors>& tensors, const py::object& partials) {
  auto held =
      std::make_shared<PinnedAddresses>(torch, "a CUDA graph has captured a run()",
                                        "the graph holds its address: construct another wrapper");
  held->hold("int_workspace_buffer", buffer->tensor(),
             {.address = reinterpret_cast<Address>(memory()), .bytes = buffer->bytes()});
  if (!partials.is_none()) {
    held->hold("float_workspace_buffer", partials,
               {.address = torch->address_of(partials.ptr()), .bytes = plan()->float_bytes()});
  }
  shared = true;
  {
    const std::lock_guard lock(guard_);
    PerSegment<Captured> now;
    for (int s = 0; s < tensors.size(); ++s) {
      const Captured one = Captured::of(tensors[s], plan()->segments()[s].batch->page_size());
      now.add(captured_ ? one.or_larger((*captured_)[s]) : one);
    }
    captured_ = now;
    held_.swap(held);
  }
  this->held()->check_storage();
}

}  // namespace preflash
