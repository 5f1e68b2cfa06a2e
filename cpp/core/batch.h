// The lengths of one batch as plan() received them, copied to the host. Kept for as long as the
// plan lives, so that another variant can be planned for the same batch without asking the caller
// again.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/page_memory.h"
#include "preflash/problem.h"

namespace preflash {

// Arguments of plan(), on the host. The indptr arrays have num_requests + 1 entries, last_page_len
// has num_requests.
struct BatchArrays {
  const std::int32_t* qo_indptr = nullptr;
  const std::int32_t* kv_indptr = nullptr;
  const std::int32_t* last_page_len = nullptr;  // null: ragged
  int num_requests = 0;
  int page_size = 0;  // 0: ragged
  // True if the lengths of queries and of keys are upper bounds: the true ones are on the device,
  // and DevicePlan::set_lengths() puts them in place before a run. NOTE: plan()'s option of this
  // name bounds the keys alone: Batch::use_kv_upper_bounds().
  bool lengths_are_upper_bounds = false;
};

// [num_requests, row_stride]: pages, one row per request.
struct BlockTables {
  const std::int32_t* data = nullptr;
  std::int64_t row_stride = 0;
};

class Batch {
 public:
  explicit Batch(const BatchArrays& arrays);

  int num_requests() const { return static_cast<int>(qo_indptr_.size()) - 1; }
  int page_size() const { return page_size_; }
  // BatchArrays::lengths_are_upper_bounds, not plan()'s option of this name.
  bool lengths_are_upper_bounds() const { return lengths_are_upper_bounds_; }
  std::int32_t qo_begin() const { return qo_indptr_.front(); }
  std::int32_t kv_begin() const { return kv_indptr_.front(); }
  std::int32_t qo_end() const { return qo_indptr_.back(); }
  std::int32_t kv_end() const { return kv_indptr_.back(); }
  std::int64_t qo_len(int request) const;
  std::int64_t kv_len(int request) const;
  std::int64_t max_qo_len() const;
  std::int64_t max_kv_len() const;

  std::span<const std::int32_t> qo_indptr() const { return qo_indptr_; }
  std::span<const std::int32_t> kv_indptr() const { return kv_indptr_; }
  std::span<const std::int32_t> last_page_len() const { return last_page_len_; }
  std::span<const std::int64_t> mask_indptr() const { return mask_indptr_; }

  // The page indices are a block table: request i's pages begin at i * row_stride. Throws
  // std::invalid_argument beyond int32.
  void use_block_table(std::int64_t row_stride);
  // Index of each request's first page in the page indices, [num_requests].
  std::span<const std::int32_t> page_begin() const {
    return has_block_table() ? page_begin_ : std::span(kv_indptr_).first(num_requests());
  }
  // Number of page indices up to the last one that a request owns.
  std::int64_t page_entries() const;

  // Makes the lengths of keys upper bounds, as plan(lengths_are_upper_bounds=True) does: a run
  // brings the numbers of keys (RunExtras::kv_lens).
  void use_kv_upper_bounds() { kv_lengths_are_upper_bounds_ = true; }
  bool kv_lengths_are_upper_bounds() const { return kv_lengths_are_upper_bounds_; }

  // A run's q has these rows and no more, as a decode batch wants it.
  void require_exact_rows() { exact_rows_ = true; }
  bool exact_rows() const { return exact_rows_; }
  // True if q may have rows of no request: before the first one's, or after the last one's.
  bool may_leave_rows(std::int64_t q_rows) const {
    return lengths_are_upper_bounds_ || qo_begin() > 0 || qo_end() < q_rows;
  }

  // Lays out the packed custom mask: every request starts on a byte.
  void use_mask();
  std::int64_t mask_elements() const { return mask_elements_; }
  std::int64_t mask_bytes() const { return mask_indptr_.empty() ? 0 : mask_indptr_.back(); }
  // begin[num_requests + 1] elements of the dense mask, then [num_requests + 1] bytes of the packed
  // one.
  void write_mask_segments(std::int64_t* begin) const;

  // Page indices on the host travel with the plan's own upload: inside of it, or from `into` if
  // that is not null. Returns the largest index that a request owns, -1 if none; throws
  // std::invalid_argument for a negative one.
  std::int32_t set_page_indices(const std::int32_t* indices, std::int64_t count,
                                std::shared_ptr<PageArray> into = nullptr);
  // The same for page indices that stay where they are.
  std::int32_t largest_page_of(const std::int32_t* indices, std::int64_t count) const;
  std::span<const std::int32_t> page_indices() const {
    return {page_indices_.get(), static_cast<std::size_t>(num_page_indices_)};
  }
  // Pinned page indices, if they have an upload of their own; null: the plan's has them.
  PinnedArray* pinned_page_indices() const { return pinned_page_indices_; }

  // The first request whose length (or page list) differs from the caller's hint; -1: none does.
  int first_qo_len_other_than(const std::int64_t* lengths) const;
  int first_kv_len_other_than(const std::int64_t* lengths) const;
  int first_pages_other_than(const std::int32_t* page_indices,
                             const BlockTables& block_tables) const;

  // Fills the parts of a problem that come from the batch. The spans point into this object.
  void describe(SegmentProblem* problem) const;

 private:
  bool has_block_table() const { return !page_begin_.empty(); }
  std::int32_t pages_of(int request) const { return kv_indptr_[request + 1] - kv_indptr_[request]; }
  // Index of the first entry that belongs to a request, at most `count`.
  std::int64_t first_used(std::int64_t count) const;

  std::vector<std::int32_t> qo_indptr_;
  std::vector<std::int32_t> kv_indptr_;
  std::vector<std::int32_t> last_page_len_;
  std::vector<std::int64_t> mask_indptr_;
  std::vector<std::int32_t> page_begin_;                // empty: no block table
  std::shared_ptr<const std::int32_t[]> page_indices_;  // copies share them
  std::int64_t num_page_indices_ = 0;
  PinnedArray* pinned_page_indices_ = nullptr;  // page_indices_ owns it
  std::int64_t mask_elements_ = 0;
  int page_size_ = 0;
  bool lengths_are_upper_bounds_ = false;
  bool exact_rows_ = false;
  bool kv_lengths_are_upper_bounds_ = false;
};

}  // namespace preflash
