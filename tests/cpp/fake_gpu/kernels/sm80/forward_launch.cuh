// Stands in for the header of the fa2 kernels: an entry of the table, and no kernel.
#pragma once

#include <string_view>

#include "preflash/variant.h"

namespace preflash {

int smem_bytes_of(std::string_view id);

namespace sm80 {

template <class V>
ForwardKernel forward_kernel_entry() {
  ForwardKernel entry{V::kId, V::kVariant, V::kTile, smem_bytes_of(V::kId)};
  if constexpr (requires { V::kSecondTile; }) entry.second_tile = V::kSecondTile;
  return entry;
}

}  // namespace sm80
}  // namespace preflash
