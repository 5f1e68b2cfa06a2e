#include "registry/not_compiled.h"

#include <algorithm>

#include "registry/match.h"
#include "registry/matrix.h"

namespace preflash {
namespace {

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

// Lists the wanted values of all axes, with the dtypes that the caller's tensors have.
std::string asked(Variant wanted) {
  wanted.load = compiled_form(wanted).load;
  std::vector<std::string> parts;
  for (const Axis& axis : reported_axes()) {
    parts.push_back(std::string(axis.name) + " " + axis.value(wanted));
  }
  return joined(parts, ", ");
}

std::string compiled_values(std::span<const Variant> compiled) {
  if (compiled.empty()) return "nothing";
  std::vector<std::string> parts;
  for (const Axis& axis : reported_axes()) {
    std::vector<std::string> values;
    for (const Variant& variant : compiled) {
      const bool any = axis.option && traits_of(variant.family).options == OptionChoice::kRunTime;
      add_once(values, any ? "any" : axis.value(variant));
    }
    parts.push_back(std::string(axis.name) + " " + joined(values, "/"));
  }
  return joined(parts, ", ");
}

// Changes of one axis alone that would be served, e.g. "mask bounds or head_dim 64".
std::string nearest(Variant wanted, std::span<const Variant> compiled) {
  wanted = compiled_form(wanted);
  std::vector<std::string> changes;
  std::span<const Axis> axes = reported_axes();
  for (const Axis& changed : axes) {
    for (const Variant& variant : compiled) {
      bool others_serve = std::all_of(axes.begin(), axes.end(), [&](const Axis& axis) {
        return &axis == &changed || axis.serves(variant, wanted);
      });
      if (others_serve) add_once(changes, changed.name + (" " + changed.value(variant)));
    }
  }
  return joined(changes, " or ");
}

// True if "auto", which tried `wanted` first, goes on to `family`.
bool auto_falls_back(Family wanted, Family family) {
  auto rank = [](Family one) { return std::ranges::find(kPreference, one); };
  return rank(wanted) < rank(family) && traits_of(family).covers(traits_of(wanted));
}

std::string elsewhere_text(const Variant& wanted, const std::vector<Family>& elsewhere) {
  std::vector<std::string> names;
  for (Family family : elsewhere) {
    std::string name = quoted_backend(family);
    if (auto_falls_back(wanted.family, family)) name += ", which \"auto\" takes then";
    if (traits_of(family).on_cpu()) name += " (tensors on the CPU)";
    names.push_back(std::move(name));
  }
  return joined(names, " or ");
}

std::string ways_out(const std::vector<std::string>& ways) {
  if (ways.empty()) return "";
  return " What would work: " + joined(ways, "; ") + ".";
}

}  // namespace

std::string describe_not_compiled(const Variant& wanted, std::span<const Variant> compiled,
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

std::string describe_separate(const Variant& first, const Variant& second,
                              const std::vector<Family>& elsewhere) {
  std::vector<std::string> ways = {"two plans, one for each"};
  for (Family family : elsewhere) {
    std::string name = quoted_backend(family);
    if (traits_of(family).on_cpu()) name += " (tensors on the CPU)";
    ways.push_back(std::move(name));
  }
  return quoted_backend(first.family) +
         " has no kernel that runs these two segments in one launch. " +
         "Asked for: " + id_of(first) + " beside " + id_of(second) + "." + ways_out(ways);
}

std::string describe_absent(const Variant& wanted, const std::string& why,
                            const std::vector<Family>& elsewhere) {
  std::vector<std::string> ways;
  if (!elsewhere.empty()) ways.push_back(elsewhere_text(wanted, elsewhere));
  if (in_matrix(wanted)) {
    std::string build = "a preflash built with PREFLASH_CUDA=ON";
    FamilyTraits traits = traits_of(wanted.family);
    if (traits.one_architecture()) {
      build += " and " + std::string(traits.architecture) + " among PREFLASH_ARCHS";
    }
    ways.push_back(std::move(build));
  }
  return quoted_backend(wanted.family) + " has no kernels in this installation: " + why +
         ". Asked for: " + asked(wanted) + "." + ways_out(ways);
}

}  // namespace preflash
