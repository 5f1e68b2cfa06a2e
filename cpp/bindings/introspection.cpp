// Compiled kernels and this machine's devices, for the command line, the tests and error messages.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/device.h"
#include "core/plan.h"
#include "core/pod_cost.h"
#include "cpu/cpu_backend.h"
#include "registry/match.h"
#include "registry/matrix.h"
#include "registry/registry.h"

namespace preflash {
namespace {

namespace py = pybind11;

// Generated: bind_vocabulary() and describe_variant().
#include "bindings/bind_vocabulary.inl"

using Side = std::pair<AttentionOptions, std::shared_ptr<Batch>>;

py::dict describe(const TileShape& tile) {
  py::dict row;
  row["m"] = tile.m;
  row["n"] = tile.n;
  row["stages"] = tile.stages;
  row["warps"] = tile.warps;
  row["ctas_per_sm"] = tile.ctas_per_sm;
  return row;
}

py::dict describe(const ForwardKernel& kernel) {
  py::dict row;
  row["id"] = kernel.id;
  row["backend"] = std::string(backend_of(kernel.variant.family));
  describe_variant(kernel.variant, row);
  row["tile"] = describe(kernel.tile);
  if (kernel.variant.segments == Segments::kTwo) row["second_tile"] = describe(kernel.second_tile);
  row["smem_bytes"] = kernel.smem_bytes;
  return row;
}

py::list kernels() {
  py::list rows;
  for (const ForwardKernel* kernel : Registry::instance().kernels()) rows.append(describe(*kernel));
  return rows;
}

py::dict device_facts(int device) {
  const DeviceFacts& facts = facts_of(device);
  py::dict row;
  row["device"] = facts.device;
  row["name"] = std::string(facts.name);
  row["compute_capability"] = facts.compute_capability;
  row["num_sms"] = facts.num_sms;
  row["smem_per_block"] = facts.smem_per_block;
  row["smem_per_sm"] = facts.smem_per_sm;
  row["l2_bytes"] = facts.l2_bytes;
  return row;
}

int cuda_device_count() {
  const DeviceServices* cuda = Registry::instance().cuda();
  return cuda == nullptr ? 0 : cuda->device_count();
}

std::string cuda_version() {
  const DeviceServices* cuda = Registry::instance().cuda();
  return cuda == nullptr ? "" : cuda->cuda_version;
}

std::string cuda_error() {
  return Registry::instance().cuda() == nullptr ? Registry::instance().cuda_error() : "";
}

// None if a kernel covers the variant, else the sentence that says why none does. Values of options
// are checked by plan() alone (planner/validate.cpp).
py::object error_of(const Variant& wanted) {
  FoundKernel found = Registry::instance().find(wanted);
  return found.kernel != nullptr ? py::object(py::none()) : py::object(py::str(found.error));
}

py::object joint_error_of(Family family, const AttentionOptions& first,
                          const AttentionOptions& second) {
  const Variant wanted[] = {variant_of(first, family), variant_of(second, family)};
  if (traits_of(family).segments == OptionChoice::kRunTime) {
    py::object error = error_of(wanted[0]);
    return error.is_none() ? error_of(wanted[1]) : error;
  }
  FoundKernel found = Registry::instance().find_joint(wanted[0], wanted[1]);
  return found.kernel != nullptr ? py::object(py::none()) : py::object(py::str(found.error));
}

void bind_families(py::module_& m) {
  py::class_<FamilyTraits>(m, "FamilyTraits")
      .def_readonly("backend", &FamilyTraits::backend)
      .def_readonly("item_keys", &FamilyTraits::item_keys)
      .def_property_readonly(
          "token_aligned",
          [](const FamilyTraits& traits) { return traits.tile_rows == TileRows::kTokenAligned; })
      .def_property_readonly("on_cpu", &FamilyTraits::on_cpu)
      .def_property_readonly("one_architecture", &FamilyTraits::one_architecture)
      .def("runs_on", &FamilyTraits::runs_on, py::arg("compute_capability"));
  m.def("traits_of", &traits_of, py::arg("family"));
  m.def(
      "families", [] { return std::vector(std::begin(kPreference), std::end(kPreference)); },
      "Every family, in the order of preference.");
  m.def("families_for", &families_for, py::arg("compute_capability"),
        "What backend='auto' tries on a device, best first; 0 is the CPU.");
}

}  // namespace

void bind_introspection(py::module_& m) {
  bind_vocabulary(m);
  bind_families(m);
  m.attr("__version__") = PREFLASH_VERSION;
  m.attr("abi_version") = kKernelAbiVersion;
  m.def("compiled_for", &compiled_for, py::arg("architectures"), py::arg("compute_capability"));
  m.def(
      "architectures",
      [](Family family) {
        FoundLibrary found = Registry::instance().library(family);
        return std::string(found.table == nullptr ? "" : found.table->architectures);
      },
      py::arg("family"), "What the family's kernels were compiled for; empty where none are here.");
  m.def("set_library_dir",
        [](const std::string& directory) { Registry::instance().set_library_dir(directory); });
  m.def("kernels", &kernels, "Every compiled kernel that was found, one dict each.");
  m.def("find_id", [](const Variant& wanted) -> py::object {
    FoundKernel found = Registry::instance().find(wanted);
    return found.kernel != nullptr ? py::object(py::str(found.kernel->id)) : py::object(py::none());
  });
  m.def("find_error", &error_of, py::arg("wanted"));
  m.def(
      "find_error",
      [](Family family, const AttentionOptions& options) {
        return error_of(variant_of(options, family));
      },
      py::arg("family"), py::arg("options"));
  m.def("find_joint_error", &joint_error_of, py::arg("family"), py::arg("first"), py::arg("second"),
        "The same of one launch that runs two segments side by side.");
  m.def(
      "prefer_two_launches",
      [](Family family, const Side& prefill, const Side& decode) {
        return prefer_two_launches(traits_of(family),
                                   {.options = prefill.first, .batch = prefill.second},
                                   {.options = decode.first, .batch = decode.second});
      },
      py::arg("family"), py::arg("prefill"), py::arg("decode"),
      "Whether a launch for each is expected to take less time than one for both.");
  m.def(
      "in_matrix",
      [](Family family, const AttentionOptions& options) {
        return in_matrix(variant_of(options, family));
      },
      py::arg("family"), py::arg("options"), "Whether a build of every variant serves them.");
  m.def(
      "find_in_matrix",
      [](const Variant& wanted) {
        const Variant* found = find_in_matrix(wanted);
        return found != nullptr ? std::optional(*found) : std::nullopt;
      },
      py::arg("wanted"), "What a build of every variant would run, or None.");
  m.def("cpu_isa", &cpu_isa_name, "The instruction set that the CPU backend uses on this machine.");
  m.def("device_facts", &device_facts, py::arg("device"));
  m.def("cuda_device_count", &cuda_device_count);
  m.def("cuda_version", &cuda_version);
  m.def("cuda_error", &cuda_error, "Why CUDA cannot be used; empty when it can.");
}

}  // namespace preflash
