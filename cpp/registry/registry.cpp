#include "registry/registry.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "cpu/cpu_backend.h"
#include "registry/match.h"
#include "registry/not_compiled.h"
#include "registry/shared_library.h"

namespace preflash {

template <class Table>
struct Loaded {
  const Table* table = nullptr;
  std::string error = {};
};

namespace {

std::string library_path(const std::string& dir, std::string_view suffix) {
  return dir + "/libpreflash_kernels_" + std::string(suffix) + ".so";
}

// Libraries of another build are refused: their structs may be laid out differently.
std::string abi_error(const std::string& path, int found, int needed) {
  if (found == needed) return "";
  return path + " has kernel ABI " + std::to_string(found) + ", this module needs " +
         std::to_string(needed) + ": take both from one build of preflash";
}

template <class Table>
constexpr int kAbiOf = kKernelAbiVersion;
template <>
constexpr int kAbiOf<DeviceServices> = kServicesAbiVersion;

// Calls the library's exported `const Table* symbol()`.
template <class Table>
Loaded<Table> load_table(const std::string& path, const char* symbol) {
  LoadedSymbol found = load_symbol(path, symbol);
  if (found.address == nullptr) return {.error = std::move(found.error)};
  auto get_table = reinterpret_cast<const Table* (*)()>(found.address);
  const Table* table = get_table();
  std::string error = abi_error(path, table->abi_version, kAbiOf<Table>);
  if (!error.empty()) return {.error = std::move(error)};
  return {.table = table};
}

const ForwardKernel* best_kernel(const KernelLibrary& library, const Variant& wanted) {
  const ForwardKernel* best = nullptr;
  for (int i = 0; i < library.num_kernels; ++i) {
    const ForwardKernel& kernel = library.kernels[i];
    if (!serves(kernel.variant, wanted)) continue;
    if (best == nullptr || serves_better(kernel.variant, best->variant, wanted)) best = &kernel;
  }
  return best;
}

std::vector<Variant> variants_of(const KernelLibrary& library) {
  std::vector<Variant> variants;
  for (int i = 0; i < library.num_kernels; ++i) variants.push_back(library.kernels[i].variant);
  return variants;
}

}  // namespace

std::vector<Family> families_for(int compute_capability) {
  std::vector<Family> families;
  for (Family family : kPreference) {
    if (traits_of(family).runs_on(compute_capability)) families.push_back(family);
  }
  if (!families.empty()) return families;
  std::ranges::copy_if(kPreference, std::back_inserter(families),
                       [](Family family) { return !traits_of(family).on_cpu(); });
  return families;
}

struct Registry::State {
  std::mutex mutex;
  std::string dir = own_directory() + "/lib";
  bool dir_used = false;
  std::optional<Loaded<DeviceServices>> cuda;
  std::array<std::optional<Loaded<KernelLibrary>>, std::size(kFamilies)> libraries;
  // Cache of the kernels that find() returned: every step of an engine asks for the same variant,
  // and a library has some hundred kernels.
  std::unordered_map<Variant, const ForwardKernel*, VariantHash> found;

  const Loaded<DeviceServices>& services() {
    if (!cuda) {
      dir_used = true;
      cuda = load_table<DeviceServices>(library_path(dir, "common"), "preflash_device_services");
    }
    return *cuda;
  }

  const Loaded<KernelLibrary>& library(Family family) {
    std::optional<Loaded<KernelLibrary>>& slot = libraries.at(static_cast<std::size_t>(family));
    if (slot) return *slot;
    if (traits_of(family).on_cpu()) {
      slot = Loaded<KernelLibrary>{.table = cpu_kernel_library()};
    } else {
      dir_used = true;
      slot =
          load_table<KernelLibrary>(library_path(dir, name_of(family)), "preflash_kernel_library");
    }
    return *slot;
  }

  // Other families that would serve the same request.
  std::vector<Family> elsewhere(const Variant& wanted) {
    std::vector<Family> families;
    for (Family family : kFamilies) {
      if (family == wanted.family) continue;
      const KernelLibrary* table = library(family).table;
      Variant there = wanted;
      there.family = family;
      if (table != nullptr && best_kernel(*table, there) != nullptr) families.push_back(family);
    }
    return families;
  }

  // Other families that run two segments whatever kernels they are for.
  std::vector<Family> families_with_segments() {
    std::vector<Family> families;
    for (Family family : kFamilies) {
      const KernelLibrary* table = library(family).table;
      if (table != nullptr && table->launch_segments != nullptr) families.push_back(family);
    }
    return families;
  }
};

bool compiled_for(std::string_view architectures, int compute_capability) {
  for (std::size_t begin = 0; begin < architectures.size();) {
    std::size_t end = std::min(architectures.find(';', begin), architectures.size());
    std::string_view name = architectures.substr(begin, end - begin);
    int built_for = 0;
    std::from_chars(name.data(), name.data() + name.size(), built_for);
    bool ptx = name.find("PTX") != std::string_view::npos;
    bool nowhere_else = name.back() == 'a';
    bool same_generation = built_for / 10 == compute_capability / 10;
    if (built_for == compute_capability) return true;
    if (built_for < compute_capability && !nowhere_else && (same_generation || ptx)) return true;
    begin = end + 1;
  }
  return false;
}

Registry& Registry::instance() {
  static Registry registry;
  return registry;
}

Registry::Registry() : state_(new State) {}
Registry::~Registry() { delete state_; }

void Registry::set_library_dir(std::string dir) {
  std::lock_guard lock(state_->mutex);
  if (dir == state_->dir) return;
  if (state_->dir_used) {
    throw std::logic_error("set_library_dir(\"" + dir +
                           "\"): kernel libraries were already looked " + "for in " + state_->dir +
                           "; set the directory before the first plan()");
  }
  state_->dir = std::move(dir);
}

const DeviceServices* Registry::cuda() {
  std::lock_guard lock(state_->mutex);
  return state_->services().table;
}

std::string Registry::cuda_error() {
  std::lock_guard lock(state_->mutex);
  return state_->services().error;
}

FoundLibrary Registry::library(Family family) {
  std::lock_guard lock(state_->mutex);
  const Loaded<KernelLibrary>& found = state_->library(family);
  return {.table = found.table, .error = found.error};
}

FoundKernel Registry::find(const Variant& wanted) {
  std::lock_guard lock(state_->mutex);
  const auto known = state_->found.find(wanted);
  if (known != state_->found.end()) return {.kernel = known->second};
  const Loaded<KernelLibrary>& found = state_->library(wanted.family);
  if (found.table == nullptr) {
    return {.error = describe_absent(wanted, found.error, state_->elsewhere(wanted))};
  }
  if (const ForwardKernel* kernel = best_kernel(*found.table, wanted)) {
    state_->found.emplace(wanted, kernel);
    return {.kernel = kernel};
  }
  std::vector<Variant> compiled = variants_of(*found.table);
  return {.error = describe_not_compiled(wanted, compiled, state_->elsewhere(wanted))};
}

FoundKernel Registry::find_joint(const Variant& first, const Variant& second) {
  const auto joint = [&](Variant wanted) {
    wanted.segments = Segments::kTwo;
    wanted.mask = first.mask;
    return find(wanted);
  };
  const FoundKernel of_first = joint(first);
  if (of_first.kernel == nullptr) return of_first;
  const FoundKernel of_second = joint(second);
  if (of_second.kernel == nullptr) return of_second;
  if (of_first.kernel == of_second.kernel && second.mask == Mask::kBounds) return of_first;
  std::lock_guard lock(state_->mutex);
  return {.error = describe_separate(first, second, state_->families_with_segments())};
}

FoundLaunch Registry::find_launch(const PerSegment<const ForwardKernel*>& kernels) {
  if (kernels.size() == 1) return {.launch = kernels[0]->launch};
  std::lock_guard lock(state_->mutex);
  const Family family = kernels[0]->variant.family;
  if (ForwardLaunch launch = state_->library(family).table->launch_segments) {
    return {.launch = launch};
  }
  return {.error = describe_separate(kernels[0]->variant, kernels[1]->variant,
                                     state_->families_with_segments())};
}

std::vector<const ForwardKernel*> Registry::kernels() {
  std::lock_guard lock(state_->mutex);
  std::vector<const ForwardKernel*> all;
  for (Family family : kFamilies) {
    const KernelLibrary* table = state_->library(family).table;
    for (int i = 0; table != nullptr && i < table->num_kernels; ++i) {
      all.push_back(&table->kernels[i]);
    }
  }
  return all;
}

}  // namespace preflash
