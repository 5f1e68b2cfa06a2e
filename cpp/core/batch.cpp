#include "core/batch.h"

#include <algorithm>

#include "planner/message.h"

namespace preflash {

Batch::Batch(const BatchArrays& arrays)
    : qo_indptr_(arrays.qo_indptr, arrays.qo_indptr + arrays.num_requests + 1),
      kv_indptr_(arrays.kv_indptr, arrays.kv_indptr + arrays.num_requests + 1),
      page_size_(arrays.page_size) {
  if (arrays.last_page_len != nullptr) {
    last_page_len_.assign(arrays.last_page_len, arrays.last_page_len + arrays.num_requests);
  }
}

std::int64_t Batch::qo_len(int request) const {
  return static_cast<std::int64_t>(qo_indptr_[request + 1]) - qo_indptr_[request];
}

std::int64_t Batch::kv_len(int request) const {
  std::int64_t units = static_cast<std::int64_t>(kv_indptr_[request + 1]) - kv_indptr_[request];
  return page_size_ == 0 ? units : kv_length(units, page_size_, last_page_len_[request]);
}

std::int64_t Batch::max_qo_len() const {
  std::int64_t longest = 0;
  for (int i = 0; i < num_requests(); ++i) longest = std::max(longest, qo_len(i));
  return longest;
}

std::int64_t Batch::max_kv_len() const {
  std::int64_t longest = 0;
  for (int i = 0; i < num_requests(); ++i) longest = std::max(longest, kv_len(i));
  return longest;
}

void Batch::use_mask() {
  mask_indptr_.assign(1, 0);
  mask_indptr_.reserve(num_requests() + 1);
  mask_elements_ = 0;
  for (int i = 0; i < num_requests(); ++i) {
    // Lengths that validate() will refuse must not make sizes that wrap around before it is asked.
    std::int64_t elements = 0;
    if (__builtin_mul_overflow(std::max<std::int64_t>(qo_len(i), 0),
                               std::max<std::int64_t>(kv_len(i), 0), &elements) ||
        __builtin_add_overflow(mask_elements_, elements, &mask_elements_)) {
      refuse("custom_mask: requests 0 to ", i,
             " have more queries times keys than 2^63; plan them ",
             "without a mask, or in several parts");
    }
    mask_indptr_.push_back(mask_indptr_.back() + elements / 8 + (elements % 8 != 0));
  }
}

void Batch::write_mask_segments(std::int64_t* begin) const {
  std::int64_t elements = 0;
  for (int i = 0; i < num_requests(); ++i) {
    begin[i] = elements;
    elements += qo_len(i) * kv_len(i);
  }
  begin[num_requests()] = elements;
  std::copy(mask_indptr_.begin(), mask_indptr_.end(), begin + num_requests() + 1);
}

void Batch::set_page_indices(const std::int32_t* indices, std::int64_t count) {
  page_indices_.assign(indices, indices + count);
  scan_page_indices(indices, count);
}

void Batch::scan_page_indices(const std::int32_t* indices, std::int64_t count) {
  std::int64_t first = std::clamp<std::int64_t>(kv_indptr_.front(), 0, count);
  std::int32_t smallest = first < count ? indices[first] : 0;
  std::int32_t largest = first < count ? indices[first] : -1;
  // Two plain reductions, which compilers vectorise. NOTE: of locals; members might be what the
  // indices are, as far as a compiler knows.
  for (std::int64_t i = first; i < count; ++i) {
    smallest = std::min(smallest, indices[i]);
    largest = std::max(largest, indices[i]);
  }
  min_page_ = smallest;
  max_page_ = largest;
}

int Batch::first_qo_len_other_than(const std::int64_t* lengths) const {
  for (int i = 0; i < num_requests(); ++i) {
    if (lengths[i] != qo_len(i)) return i;
  }
  return -1;
}

int Batch::first_kv_len_other_than(const std::int64_t* lengths) const {
  for (int i = 0; i < num_requests(); ++i) {
    if (lengths[i] != kv_len(i)) return i;
  }
  return -1;
}

int Batch::first_pages_other_than(const std::int32_t* page_indices,
                                  const BlockTables& block_tables) const {
  for (int i = 0; i < num_requests(); ++i) {
    const std::int32_t* row = block_tables.data + i * block_tables.row_stride;
    if (!std::equal(page_indices + kv_indptr_[i], page_indices + kv_indptr_[i + 1], row)) return i;
  }
  return -1;
}

void Batch::describe(SegmentProblem* problem) const {
  problem->qo_indptr = qo_indptr_;
  problem->kv_indptr = kv_indptr_;
  problem->last_page_len = last_page_len_;
  problem->mask_indptr = mask_indptr_;
  problem->page_size = page_size_;
}

}  // namespace preflash
