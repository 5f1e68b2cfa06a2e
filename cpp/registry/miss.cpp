#include "registry/miss.h"

#include <algorithm>

#include "registry/matrix.h"

namespace preflash {
namespace {

std::string head_dim_text(const Variant& variant) {
  std::string qk = std::to_string(variant.head_dim_qk);
  if (variant.head_dim_qk == variant.head_dim_vo) return qk;
  return "(" + qk + ", " + std::to_string(variant.head_dim_vo) + ")";
}

// What torch calls it, without the prefix.
std::string dtype_text(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
  }
  return "?";
}

// One axis of the matrix as a caller reads it.
struct Axis {
  const char* name;
  std::string (*value)(const Variant&);
  bool (*serves)(const Variant& compiled, const Variant& wanted);
};

constexpr Axis kAxes[] = {
    {"q dtype", [](const Variant& v) { return dtype_text(v.q_dtype); },
     [](const Variant& c, const Variant& w) { return c.q_dtype == w.q_dtype; }},
    {"kv dtype", [](const Variant& v) { return dtype_text(v.kv_dtype); },
     [](const Variant& c, const Variant& w) { return c.kv_dtype == w.kv_dtype; }},
    {"head_dim", head_dim_text,
     [](const Variant& c, const Variant& w) {
       return c.head_dim_qk >= w.head_dim_qk && c.head_dim_vo >= w.head_dim_vo;
     }},
    {"logits", [](const Variant& v) { return std::string(name_of(v.logits)); },
     [](const Variant& c, const Variant& w) { return c.logits == w.logits; }},
    {"mask", [](const Variant& v) { return std::string(name_of(v.mask)); },
     [](const Variant& c, const Variant& w) { return c.mask == w.mask; }},
};

std::string quoted_backend(Family family) {
  return "backend \"" + std::string(backend_of(family)) + "\"";
}

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += separator;
    text += part;
  }
  return text;
}

void add_once(std::vector<std::string>& values, std::string value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) {
    values.push_back(std::move(value));
  }
}

std::string asked(const Variant& wanted) {
  std::vector<std::string> parts;
  for (const Axis& axis : kAxes) parts.push_back(std::string(axis.name) + " " + axis.value(wanted));
  return joined(parts, ", ");
}

std::string compiled_values(std::span<const Variant> compiled) {
  if (compiled.empty()) return "nothing";
  std::vector<std::string> parts;
  for (const Axis& axis : kAxes) {
    std::vector<std::string> values;
    for (const Variant& variant : compiled) add_once(values, axis.value(variant));
    parts.push_back(std::string(axis.name) + " " + joined(values, "/"));
  }
  return joined(parts, ", ");
}

// Changes of one axis alone that would be served, e.g. "mask bounds or head_dim 64".
std::string nearest(const Variant& wanted, std::span<const Variant> compiled) {
  std::vector<std::string> changes;
  for (const Axis& changed : kAxes) {
    for (const Variant& variant : compiled) {
      bool others_serve = std::all_of(std::begin(kAxes), std::end(kAxes), [&](const Axis& axis) {
        return &axis == &changed || axis.serves(variant, wanted);
      });
      if (others_serve) add_once(changes, changed.name + (" " + changed.value(variant)));
    }
  }
  return joined(changes, " or ");
}

bool in_matrix(const Variant& wanted) {
  std::span<const Variant> matrix = every_variant();
  return std::any_of(matrix.begin(), matrix.end(),
                     [&](const Variant& variant) { return serves(variant, wanted); });
}

std::string elsewhere_text(const Variant& wanted, const std::vector<Family>& elsewhere) {
  std::vector<std::string> names;
  for (Family family : elsewhere) {
    std::string name = quoted_backend(family);
    if (wanted.family == Family::kSm90 && family == Family::kSm80) {
      name += ", which \"auto\" takes then";
    }
    if (family == Family::kCpu) name += " (tensors on the CPU)";
    names.push_back(std::move(name));
  }
  return joined(names, " or ");
}

std::string ways_out(const std::vector<std::string>& ways) {
  if (ways.empty()) return "";
  return " What would work: " + joined(ways, "; ") + ".";
}

}  // namespace

bool serves(const Variant& compiled, const Variant& wanted) {
  if (compiled.family != wanted.family) return false;
  return std::all_of(std::begin(kAxes), std::end(kAxes),
                     [&](const Axis& axis) { return axis.serves(compiled, wanted); });
}

std::string describe_miss(const Variant& wanted, std::span<const Variant> compiled,
                          const std::vector<Family>& elsewhere) {
  std::vector<std::string> ways;
  std::string changes = nearest(wanted, compiled);
  if (!changes.empty()) ways.push_back("the same with " + changes);
  if (!elsewhere.empty()) ways.push_back(elsewhere_text(wanted, elsewhere));
  if (in_matrix(wanted)) ways.push_back("a build with PREFLASH_PRESET=full, which compiles it");
  return quoted_backend(wanted.family) + " has no compiled kernel for " + asked(wanted) +
         ". Compiled for it (not in every combination): " + compiled_values(compiled) + "." +
         ways_out(ways);
}

std::string describe_absent(const Variant& wanted, const std::string& why,
                            const std::vector<Family>& elsewhere) {
  std::vector<std::string> ways;
  if (!elsewhere.empty()) ways.push_back(elsewhere_text(wanted, elsewhere));
  if (in_matrix(wanted)) {
    bool hopper = wanted.family == Family::kSm90;
    ways.push_back(std::string("a preflash built with PREFLASH_CUDA=ON") +
                   (hopper ? " and 90 among PREFLASH_ARCHS" : ""));
  }
  return quoted_backend(wanted.family) + " has no kernels in this installation: " + why +
         ". Asked for: " + asked(wanted) + "." + ways_out(ways);
}

}  // namespace preflash
