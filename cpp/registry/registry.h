// Answers plan()'s one question about kernels: which compiled one serves this variant? The CPU
// kernels are part of this module; the CUDA ones live in shared libraries that are loaded when
// first asked for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "preflash/device_services.h"
#include "preflash/per_segment.h"
#include "preflash/variant.h"

namespace preflash {

// Exactly one of the two is set.
struct FoundKernel {
  const ForwardKernel* kernel = nullptr;
  std::string error = {};
};

// Exactly one of the two is set.
struct FoundLaunch {
  ForwardLaunch launch = nullptr;
  std::string error = {};
};

// A family's kernels, or the sentence that says why they are not here. Exactly one is set.
struct FoundLibrary {
  const KernelLibrary* table = nullptr;
  std::string error = {};
};

// Returns the families that backend="auto" tries on a device, best first; capability 0 is the CPU.
// For a GPU that no family runs on: all GPU families, whose errors say why.
std::vector<Family> families_for(int compute_capability);

// True if a GPU runs a library that was compiled for these architectures, as in "80;90+PTX".
// Machine code runs on its own generation only, from the minor version that it was built for; PTX
// ("90+PTX") on everything later; code of a feature set ("90a") nowhere else.
bool compiled_for(std::string_view architectures, int compute_capability);

// Process-wide and thread-safe. Tables and kernels live as long as the process.
class Registry {
 public:
  static Registry& instance();

  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // Sets the directory of the kernel libraries; the default is `lib` beside this module. Throws
  // std::logic_error for another directory once a library has been loaded.
  void set_library_dir(std::string dir);

  // Returns the services of libpreflash_kernels_common.so, or nullptr if it cannot be loaded;
  // cuda_error() then says why. A machine without a GPU still gets services: they report no
  // devices.
  const DeviceServices* cuda();
  std::string cuda_error();

  // The kernel for `wanted`, whose head dims are the caller's: the smallest compiled size that
  // covers them is taken. Family and dtypes are met exactly, options also by kernels that have them
  // at run time. The tile class is a preference: another one computes the same result, so it is
  // taken where the wanted one is not compiled.
  FoundKernel find(const Variant& wanted);

  // The kernel that is compiled for both segments of a launch, in a family whose kernels do not
  // take any. Only the first may have a custom mask.
  FoundKernel find_joint(const Variant& first, const Variant& second);

  // Finds the function that runs the segments of these kernels as one launch.
  FoundLaunch find_launch(const PerSegment<const ForwardKernel*>& kernels);

  FoundLibrary library(Family family);

  // Every kernel of every library that is here, for `info` and `variants`.
  std::vector<const ForwardKernel*> kernels();

 private:
  struct State;

  Registry();
  ~Registry();

  State* state_;
};

}  // namespace preflash
