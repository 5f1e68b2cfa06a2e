// The TMA tensor maps of one launch, which the host encodes.
//
// K and V, ragged or paged: a tile is loaded as boxes of `box_rows` keys. A box may reach past the
// request's end or below a window. Those rows must be loaded as zeros: another request's NaN times
// a zero probability would be NaN. TMA fills with zeros what lies outside the tensor's dimensions,
// but a request does not end where a dimension does. So the row appears twice, in two dimensions of
//   column  head_dim            128 bytes of them a box
//   r       box_rows            from -(box_rows - used): rows below 0 are outside
//   x       rows                first used row, of the page or of the ragged tensor
//   head    num_kv_heads
//   page    num_pages
// and row = x + r. The used rows are at the end of the box. In a box that begins below a window
// they belong there; in the box with a request's last key the kernel's mask takes it into account
// (kernels/sm90/forward_mask.cuh).
// To put the zeros at the end, the tensor would have to begin before its first byte; TMA
// faults if nothing is mapped there. A batch-invariant plan needs each key in its place, whichever
// keys follow: it loads the box with a request's last key row by row, and its boxes are small.
#pragma once

#include <cuda.h>

#include "preflash/params.h"
#include "preflash/types.h"

namespace preflash {

struct KvMaps {
  CUtensorMap boxes;
  CUtensorMap row;  // a box of one row; where BoxShape::tail_rows is 0
};

struct TensorMaps {
  CUtensorMap q;  // [kv head, token, head in group, column]
  KvMaps k;
  KvMaps v;
};

// The box sizes of one launch.
struct BoxShape {
  int q_heads = 1;    // group_size, or 1 where a group exceeds a tile
  int q_tokens = 1;   // tokens that fit a tile, or 1 where a group exceeds it
  int kv_rows = 0;    // divides the tile and the page; 0: rows are gathered without TMA
  int tail_rows = 0;  // rows of a box in which a request's last key comes last; 0: every key is in
                      // its place
};

BoxShape box_shape(const ForwardSegment& params, int tile_m, int tile_n);

// Return nullptr, or a message if the driver refuses.
const char* encode_q_map(const ForwardSegment& params, const BoxShape& box, TensorMaps& maps);
const char* encode_kv_maps(const ForwardSegment& params, const BoxShape& box, TensorMaps& maps);

}  // namespace preflash
