// The pre-pass: right before the attention kernel, on the same stream, it makes copies
// of what the kernel would otherwise convert again for every query tile: K rotated (RoPE) and
// dequantised (fp8), V dequantised, Q rotated or dequantised, paged K and V in contiguous rows. An
// ordinary kernel then computes on the copies. plan() makes copies where they pay and where the
// float workspace has room: copies grow with the cache.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "preflash/options.h"
#include "preflash/problem.h"
#include "preflash/variant.h"

namespace preflash {

// The options of the kernel that reads copies; none if there is nothing to copy, or if no kernel
// writes the output's dtype.
std::optional<AttentionOptions> prepass_options(AttentionOptions options);

// True with Prepass::kAlways; with kAuto if copies are faster than `converting`, which converts on
// load, and neither round more nor break the promise of a fixed split.
bool prefers_prepass(const SegmentProblem& problem, const ForwardKernel& converting);

// True if the number of keys in the batch fits in int32, which counts the rows of copies.
bool has_prepass_rows(const SegmentProblem& problem);

// Place of an operand's rows as the kernel reads them. K's copy is always in the workspace.
enum class PrepassPlace : std::uint8_t {
  kCaller,     // in the caller's tensor: they need no change
  kWorkspace,  // a copy
  kOut,        // in the rows of the output that their own results replace
};

// A batch whose keys and values are contiguous copies, one request behind the other.
class PrepassForm {
 public:
  // options: prepass_options() of the problem's, which has_prepass_rows(). kernel: the ordinary one
  // that serves them.
  PrepassForm(const SegmentProblem& problem, const AttentionOptions& options,
              const ForwardKernel& kernel);

  const AttentionOptions& options() const { return options_; }
  const ForwardKernel& kernel() const { return *kernel_; }
  std::int32_t num_requests() const { return static_cast<std::int32_t>(kv_indptr_.size()) - 1; }
  std::int32_t num_keys() const { return kv_indptr_.back(); }
  PrepassPlace q() const { return q_; }
  PrepassPlace v() const { return v_; }

  // Size and offsets of the copies of k, v and q, one after the other in the float workspace.
  std::int64_t bytes() const { return q_offset() + q_bytes_; }
  std::int64_t v_offset() const { return k_bytes_; }
  std::int64_t q_offset() const { return k_bytes_ + v_bytes_; }

  // Problem that the kernel computes. Its spans point into this object and where `problem`'s do.
  SegmentProblem problem_of_kernel(SegmentProblem problem) const;

 private:
  AttentionOptions options_;
  const ForwardKernel* kernel_;
  std::vector<std::int32_t> kv_indptr_;  // [num_requests + 1], from 0
  PrepassPlace q_ = PrepassPlace::kCaller;
  PrepassPlace v_ = PrepassPlace::kCaller;
  std::int64_t k_bytes_ = 0;
  std::int64_t v_bytes_ = 0;
  std::int64_t q_bytes_ = 0;
};

}  // namespace preflash
