#include "bindings/start_launch.h"

#include <stdexcept>
#include <utility>

#include "core/device.h"
#include "cpu/interrupt.h"

namespace preflash {

namespace py = pybind11;

namespace {

// Runs Python's signal handlers, as the interpreter does between bytecodes: Ctrl-C raises there.
bool signal_handler_raised() {
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Other Python threads go on meanwhile: on the CPU this is the computation, and on a GPU a launch
// waits where the queue is full, maybe for a host callback that needs the interpreter.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace

SegmentArguments segment_arguments(Address q, Address k, Address v, Address o, Address lse,
                                   float sm_scale, float out_scale, float lse_scale,
                                   const RunExtras* extras) {
  return {.q = pointer<const void>(q),
          .k = pointer<const void>(k),
          .v = pointer<const void>(v),
          .o = pointer<void>(o),
          .lse = pointer<float>(lse),
          .extras = extras == nullptr ? RunExtras{} : *extras,
          .sm_scale = sm_scale,
          .out_scale = out_scale,
          .lse_scale = lse_scale};
}

bool run_interruptibly(Launch& launch, const RunArguments& arguments) {
  const cpu::InterruptScope interruptible(&signal_handler_raised);
  try {
    return launch.run(arguments);
  } catch (const std::runtime_error&) {
    py::gil_scoped_acquire acquire;
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw;
  }
}

Address address_of(PyObject* value) {
  const auto address = static_cast<Address>(PyLong_AsUnsignedLongLong(value));
  if (address == static_cast<Address>(-1) && PyErr_Occurred()) throw py::error_already_set();
  return address;
}

float float_of(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return static_cast<float>(number);
}

void use_memory(const HeldMemory& held, py::handle float_workspace, RunArguments* arguments) {
  held.check();
  if (float_workspace.is_none()) return;
  const TensorMemory memory = memory_of(held.torch(), "float_workspace_buffer", float_workspace);
  arguments->float_workspace = pointer<void>(memory.address);
  arguments->float_workspace_bytes = memory.bytes;
}

Starter Starter::of(const py::object& launch, std::shared_ptr<const HeldMemory> memory,
                    const py::object& num_threads) {
  return {.owner = launch,
          .launch = launch.cast<Launch*>(),
          .memory = std::move(memory),
          .num_threads = num_threads};
}

bool Starter::start(RunArguments arguments, py::handle float_workspace) const {
  use_memory(*memory, float_workspace, &arguments);
  if (num_threads.is_none()) {
    const WithoutInterpreter others_run;
    return launch->run(arguments);
  }
  arguments.num_threads = num_threads().cast<int>();
  check_num_threads(arguments.num_threads);
  const WithoutInterpreter others_run;
  return run_interruptibly(*launch, arguments);
}

}  // namespace preflash
