// What is compiled and what this machine has, for the command line, the tests and error messages.
#include <pybind11/pybind11.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "cpu/cpu_backend.h"
#include "registry/registry.h"

namespace preflash {
namespace {

namespace py = pybind11;

py::dict describe(const ForwardKernel& kernel) {
  const Variant& variant = kernel.variant;
  py::dict tile;
  tile["m"] = kernel.tile.m;
  tile["n"] = kernel.tile.n;
  tile["stages"] = kernel.tile.stages;
  tile["warps"] = kernel.tile.warps;
  tile["ctas_per_sm"] = kernel.tile.ctas_per_sm;
  py::dict row;
  row["id"] = kernel.id;
  row["family"] = std::string(name_of(variant.family));
  row["backend"] = std::string(backend_of(variant.family));
  row["q_dtype"] = std::string(name_of(variant.q_dtype));
  row["kv_dtype"] = std::string(name_of(variant.kv_dtype));
  row["head_dim_qk"] = variant.head_dim_qk;
  row["head_dim_vo"] = variant.head_dim_vo;
  row["tile_class"] = std::string(name_of(variant.tile_class));
  row["logits"] = std::string(name_of(variant.logits));
  row["mask"] = std::string(name_of(variant.mask));
  row["tile"] = tile;
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

Variant variant(Family family, DType q_dtype, DType kv_dtype, int head_dim_qk, int head_dim_vo,
                TileClass tile_class, Logits logits, Mask mask) {
  return {.family = family,
          .q_dtype = q_dtype,
          .kv_dtype = kv_dtype,
          .head_dim_qk = head_dim_qk,
          .head_dim_vo = head_dim_vo,
          .tile_class = tile_class,
          .logits = logits,
          .mask = mask};
}

void bind_enums(py::module_& m) {
  py::enum_<DType>(m, "DType")
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float32", DType::kFloat32)
      .value("float8_e4m3fn", DType::kFloat8E4M3)
      .value("float8_e5m2", DType::kFloat8E5M2);
  py::enum_<Family>(m, "Family")
      .value("cpu", Family::kCpu)
      .value("sm80", Family::kSm80)
      .value("sm90", Family::kSm90);
  py::enum_<TileClass>(m, "TileClass")
      .value("prefill", TileClass::kPrefill)
      .value("decode", TileClass::kDecode);
  py::enum_<Logits>(m, "Logits").value("plain", Logits::kPlain).value("softcap", Logits::kSoftCap);
  py::enum_<Mask>(m, "Mask").value("bounds", Mask::kBounds).value("custom", Mask::kCustom);
}

}  // namespace

void bind_introspection(py::module_& m) {
  bind_enums(m);
  py::class_<Variant>(m, "Variant")
      .def(py::init(&variant), py::arg("family"), py::arg("q_dtype"), py::arg("kv_dtype"),
           py::arg("head_dim_qk"), py::arg("head_dim_vo"),
           py::arg("tile_class") = TileClass::kPrefill, py::arg("logits") = Logits::kPlain,
           py::arg("mask") = Mask::kBounds);
  m.attr("__version__") = PREFLASH_VERSION;
  m.attr("abi_version") = kKernelAbiVersion;
  m.def("set_library_dir",
        [](const std::string& directory) { Registry::instance().set_library_dir(directory); });
  m.def("kernels", &kernels, "Every compiled kernel that was found, one dict each.");
  m.def("find_id", [](const Variant& wanted) -> py::object {
    FoundKernel found = Registry::instance().find(wanted);
    return found.kernel != nullptr ? py::object(py::str(found.kernel->id)) : py::object(py::none());
  });
  m.def("find_error", [](const Variant& wanted) -> py::object {
    FoundKernel found = Registry::instance().find(wanted);
    return found.kernel != nullptr ? py::object(py::none()) : py::object(py::str(found.error));
  });
  m.def("cpu_isa", &cpu_isa_name, "The instruction set that the CPU backend uses on this machine.");
  m.def("device_facts", &device_facts, py::arg("device"));
  m.def("cuda_device_count", &cuda_device_count);
  m.def("cuda_version", &cuda_version);
  m.def("cuda_error", &cuda_error, "Why CUDA cannot be used; empty when it can.");
}

}  // namespace preflash
