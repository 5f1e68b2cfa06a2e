// The memory that the plans of one wrapper go into, and torch's streams that use it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "bindings/guard.h"
#include "bindings/run_memory.h"
#include "core/device_plan.h"

namespace preflash {

class ExecutionPlan;
struct RunSettings;

// Python functions of the package for the rare paths of plan() and run().
struct RunFunctions {
  std::shared_ptr<const Torch> torch;
  // (requests, arguments of run): numbers and BoundSegment of each segment.
  pybind11::object check;
  pybind11::object refuse;   // (requests, arguments of run): raises where a gradient would be lost
  pybind11::object convert;  // (q, request): queries in the dtype that kernels read
  pybind11::object copy;     // (buffer, array, most): what upload() cannot copy from host memory
  pybind11::object to_host;  // (arrays): copies on the host, for which it waits
};

// A device and torch's current stream on it: _device.stream.DeviceStream.
class DeviceStream {
 public:
  DeviceStream(std::shared_ptr<const Torch> torch, pybind11::object python);

  int ordinal() const { return ordinal_; }
  bool on_gpu() const { return ordinal_ != kCpuDevice; }
  const pybind11::object& python() const { return python_; }
  void* current() const;
  bool is_capturing() const;
  // Orders the current stream behind another one.
  void wait_for(void* stream) const;

 private:
  std::shared_ptr<const Torch> torch_;
  pybind11::object python_;
  int ordinal_;
};

// A tensor that launches use besides the caller's. torch's allocator must not hand its memory out
// again while one of its streams uses it.
class Buffer {
 public:
  // owner: the stream that the tensor was allocated on; none: not known.
  explicit Buffer(pybind11::object tensor, std::optional<void*> owner = {});
  static std::shared_ptr<Buffer> allocate(std::int64_t bytes, const DeviceStream& device_stream);

  const pybind11::object& tensor() const { return tensor_; }
  std::int64_t bytes() const { return bytes_; }
  // True if all earlier uses end before the next operation of this stream.
  bool is_free_on(void* stream) const;
  // Records the current stream with torch's allocator, on that stream's first use.
  void used_on(const DeviceStream& device_stream, void* stream);
  void add_streams(std::set<void*>* streams) const;

 private:
  pybind11::object tensor_;
  std::int64_t bytes_;
  bool on_gpu_;
  bool owner_known_;
  mutable Guard guard_;  // guards streams_
  std::vector<void*> streams_;
};

// Orders the current stream after all earlier uses of the buffers. Not after a stream that is
// being captured: the current one would become part of the capture. And after streams that an
// earlier call has waited for, too: a graph replay on one of them since then is not visible here.
void order_behind_users(const std::vector<std::shared_ptr<Buffer>>& buffers,
                        const DeviceStream& device_stream);

// Memory for the plans of one wrapper.
//
// A work list stays whole until the next plan has succeeded, and as long as anything runs it. So
// two buffers alternate, and a plan that is made while the plan before last still runs, in another
// thread or around a signal handler, gets a third buffer. A caller's int buffer is used in place.
class Workspace : public std::enable_shared_from_this<Workspace> {
 public:
  // float_buffer, int_buffer: tensors or None. Without a float buffer, plans may use
  // set_float_bytes() of one that every run brings, if any.
  Workspace(std::shared_ptr<const RunFunctions> functions, pybind11::object device_stream,
            pybind11::object float_buffer, pybind11::object int_buffer);

  const std::shared_ptr<const RunFunctions>& functions() const { return functions_; }
  const Torch& torch() const { return *functions_->torch; }
  const DeviceStream& device_stream() const { return device_stream_; }
  // Null: every run brings its own, if any.
  const std::shared_ptr<Buffer>& float_buffer() const { return float_buffer_; }
  pybind11::object float_tensor() const;
  // Float bytes that plans may use. NOTE: a caller may have given his buffer other memory.
  std::int64_t float_bytes() const;
  void set_float_bytes(std::int64_t bytes) { float_bytes_ = bytes; }
  // Bytes of the caller's int buffer, which cannot grow; none without one.
  std::optional<std::int64_t> int_room() const;
  // A workspace for other variants of a plan: the same float buffer, and int buffers of its own.
  std::shared_ptr<Workspace> beside();

  // Memory for a work list that nothing else uses.
  std::shared_ptr<Buffer> int_buffer(std::int64_t bytes);
  // Takes back the memory of a variant that no later run uses. NOTE: a run may be under way, for
  // which the memory is kept.
  void give_back(const std::shared_ptr<ExecutionPlan>& variant);
  // The buffer of a tensor that successive plans use: the same for all of them, so that it knows
  // the streams of all their runs.
  std::shared_ptr<Buffer> buffer_of(const pybind11::object& tensor);
  // Null before the first plan: there may be no kernel library.
  std::shared_ptr<Uploader> known_uploader() const;
  std::shared_ptr<Uploader> uploader();
  // Settings of the variant's runs: those of the last plan, with the tensors that have passed the
  // checks, if the two plans differ in lengths alone.
  std::shared_ptr<RunSettings> settings_for(const ExecutionPlan& variant);

 private:
  std::shared_ptr<const RunFunctions> functions_;
  DeviceStream device_stream_;
  std::shared_ptr<Buffer> float_buffer_, given_;
  std::optional<std::int64_t> float_bytes_;
  mutable Guard guard_;  // guards what follows
  // Memory of a replaced plan, and the variant that may still run it.
  std::pair<std::shared_ptr<Buffer>, std::weak_ptr<ExecutionPlan>> spare_;
  std::map<std::pair<PyObject*, Address>, std::shared_ptr<Buffer>> lent_;
  std::shared_ptr<Uploader> uploader_;
  std::shared_ptr<RunSettings> settings_;
};

// An array of plan() that goes into the beginning of a buffer, of which it is at most `most`
// elements.
struct ArrayForBuffer {
  pybind11::handle buffer;
  pybind11::handle array;
  std::int64_t most;
};

// Adds the copy of an int32 array, unless the array is the buffer's beginning. Python copies arrays
// that are not contiguous and one-dimensional on the host.
void add_copy(const Workspace& workspace, const ArrayForBuffer& array,
              std::vector<HostCopy>* copies);

}  // namespace preflash
