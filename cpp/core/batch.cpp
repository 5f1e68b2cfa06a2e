#include "core/batch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "planner/message.h"

namespace preflash {
namespace {

// One pass over megabytes, where the batch is large: as wide as the machine can.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define PREFLASH_WIDEST [[gnu::target_clones("avx512f", "avx2", "default")]]
#else
#define PREFLASH_WIDEST
#endif

struct PageRange {
  std::int32_t smallest = 0;  // at most 0
  std::int32_t largest = -1;
};

// Vectors by hand, twelve times as fast: compilers do not vectorise two reductions in one loop, and
// unroll one too little.
constexpr std::int64_t kLanes = 16;
using Lanes [[gnu::vector_size(kLanes * sizeof(std::int32_t))]] = std::int32_t;

// copy: where to keep the pages, or null.
PREFLASH_WIDEST PageRange scan_pages(const std::int32_t* pages, std::int64_t count,
                                     std::int32_t* copy) {
  Lanes smallest = {};
  Lanes largest = Lanes{} - 1;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Lanes lanes;
    std::memcpy(&lanes, pages + i, sizeof lanes);
    if (copy != nullptr) std::memcpy(copy + i, &lanes, sizeof lanes);
    smallest = lanes < smallest ? lanes : smallest;
    largest = lanes > largest ? lanes : largest;
  }
  PageRange range;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    range.smallest = std::min(range.smallest, smallest[lane]);
    range.largest = std::max(range.largest, largest[lane]);
  }
  for (; i < count; ++i) {
    range.smallest = std::min(range.smallest, pages[i]);
    range.largest = std::max(range.largest, pages[i]);
    if (copy != nullptr) copy[i] = pages[i];
  }
  return range;
}

std::int32_t largest_page(const PageRange& range) {
  if (range.smallest < 0) {
    refuse("paged_kv_indices holds ", range.smallest, "; page indices start at 0");
  }
  return range.largest;
}

}  // namespace

Batch::Batch(const BatchArrays& arrays)
    : qo_indptr_(arrays.qo_indptr, arrays.qo_indptr + arrays.num_requests + 1),
      kv_indptr_(arrays.kv_indptr, arrays.kv_indptr + arrays.num_requests + 1),
      page_size_(arrays.page_size),
      lengths_are_upper_bounds_(arrays.lengths_are_upper_bounds) {
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
    // validate() refuses such lengths later; here they must not overflow a size.
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

std::int32_t Batch::set_page_indices(const std::int32_t* indices, std::int64_t count,
                                     std::shared_ptr<PageArray> into) {
  PinnedArray* pinned = into == nullptr ? nullptr : into->pinned();
  std::shared_ptr<std::int32_t[]> copied;
  if (into == nullptr) {
    copied = std::make_unique_for_overwrite<std::int32_t[]>(count);
  } else {
    std::int32_t* const data = into->data();
    copied = std::shared_ptr<std::int32_t[]>(std::move(into), data);
  }
  const std::int64_t first = first_used(count);
  std::copy_n(indices, first, copied.get());
  const std::int32_t largest =
      largest_page(scan_pages(indices + first, count - first, copied.get() + first));
  page_indices_ = std::move(copied);
  num_page_indices_ = count;
  pinned_page_indices_ = pinned;
  return largest;
}

void Batch::use_block_table(std::int64_t row_stride) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (row_stride < 0 || (row_stride > 0 && num_requests() > kMost / row_stride)) {
    refuse("paged_kv_indices: a block table of ", num_requests(), " rows that are ", row_stride,
           " elements apart; must be less than 2^31 elements");
  }
  page_begin_.resize(num_requests());
  for (int i = 0; i < num_requests(); ++i) {
    page_begin_[i] = static_cast<std::int32_t>(i * row_stride);
  }
}

std::int64_t Batch::page_entries() const {
  if (!has_block_table()) return kv_end();
  std::int64_t entries = 0;
  for (int i = 0; i < num_requests(); ++i) {
    if (pages_of(i) == 0) continue;
    entries = std::max<std::int64_t>(entries, page_begin_[i] + pages_of(i));
  }
  return entries;
}

std::int32_t Batch::largest_page_of(const std::int32_t* indices, std::int64_t count) const {
  if (has_block_table()) {
    std::int32_t largest = -1;
    for (int i = 0; i < num_requests(); ++i) {
      largest = std::max(largest,
                         largest_page(scan_pages(indices + page_begin_[i], pages_of(i), nullptr)));
    }
    return largest;
  }
  const std::int64_t first = first_used(count);
  return largest_page(scan_pages(indices + first, count - first, nullptr));
}

std::int64_t Batch::first_used(std::int64_t count) const {
  return std::clamp<std::int64_t>(kv_indptr_.front(), 0, count);
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
  problem->page_begin = page_begin_;
  problem->mask_indptr = mask_indptr_;
  problem->page_size = page_size_;
  problem->lengths_are_upper_bounds = lengths_are_upper_bounds_ || kv_lengths_are_upper_bounds_;
}

}  // namespace preflash
