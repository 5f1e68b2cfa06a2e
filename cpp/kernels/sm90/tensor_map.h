// TMA tensor maps of one launch, made on the host.
//
// K and V, ragged and paged alike: a tile is fetched as boxes of `box_rows` keys. Where only some
// keys of a box are wanted (it reaches past the request's end, or below a window), the other rows
// must arrive as zeros, not as a stranger's, whose NaN would meet a zero probability. TMA
// zero-fills what lies outside a tensor's dimensions, but a request's end is no dimension's end; so
// the row appears twice, in two dimensions of the same stride:
//   column  head_dim            64 of them a box
//   r       box_rows            from -(box_rows - wanted): rows below 0 are outside
//   x       rows                first wanted row, of the page or of the ragged tensor
//   head    num_kv_heads
//   page    num_pages
// and row = x + r. The wanted rows come to lie at the end of the box. For a box that begins below a
// window that is where they belong; for the one that holds a request's last key the consumers' mask
// knows (ItemTail).
// NOTE: zeros at the end instead would take a tensor that begins before its first byte. TMA faults
// on that where nothing is mapped there.
#pragma once

#include <cuda.h>

#include "preflash/params.h"
#include "preflash/types.h"

namespace preflash::sm90 {

struct TensorMaps {
  CUtensorMap q;  // [kv head, token, head in group, column]
  CUtensorMap k;
  CUtensorMap v;
};

// Boxes of this launch.
struct BoxShape {
  int q_heads = 1;   // group_size, or 1 where a group exceeds a tile
  int q_tokens = 1;  // whole tokens that fit a tile, or 1
  int kv_rows = 0;   // divides the tile and the page; 0: rows are gathered without TMA
};

BoxShape box_shape(const ForwardParams& params, int tile_m, int tile_n);

// nullptr, or what the driver refused.
const char* encode_tensor_maps(const ForwardParams& params, DType dtype, const BoxShape& box,
                               TensorMaps& maps);

}  // namespace preflash::sm90
