// EightBitSoftmax on the host, in the steps of the main loop with EightBitOperands: prints, for
// rows with one large logit, the largest error of O where the values of keys with large weights are
// 0, and all others 1.
//
// out: "tiles deviation logit error" a line; error is NaN where any is.
#include "kernels/sm90/eight_bit_softmax.cuh"

#include <cstdio>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace preflash;
using namespace preflash::sm90;
using cute::Int;

constexpr int kKeys = 128;  // of a tile
constexpr int kLaneKeys = kKeys / kLanes;
constexpr int kTilesAtOnce = 6;
constexpr float kRowSumFactor = 1.25f;
using Tiles = std::vector<std::vector<float>>;  // in the order of the loop
struct Row {
  Tiles logits, values;
};

struct Segment {
  struct {
    float scale_log2 = kLog2E;
  } logits;
  float max_sum = SpeculativeSoftmax::max_sum(LseForm::kLogSum, DType::kFloat8E4M3);
  float x_per_logit = 1.0f;
};

int lane_of(int key) { return key / 2 % kLanes; }
// Element of P: words of four weights, of rows 0 and 1 in turn.
int in_p(int row, int column) { return (column / 4 * 2 + row) * 4 + column % 4; }

float weights[2][kKeys];

// Sums as the tensor core does: terms keep 13 bits below the leading bit of the largest one.
double product(double sum, const float* p, int count) {
  double largest = sum;
  for (int i = 0; i < count; ++i) largest = std::max<double>(largest, p[i]);
  if (largest == 0.0) return 0.0;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 13);
  double result = std::floor(sum / unit) * unit;
  for (int i = 0; i < count; ++i) result += std::floor(p[i] / unit) * unit;
  return result;
}

void run_lane(int this_lane, const Row (&rows)[2], double (&o)[2]) {
  lane = this_lane;
  const Segment segment;
  const float scale = segment.logits.scale_log2;
  EightBitSoftmax<false> softmax;
  auto scores = cute::make_tensor<float>(cute::make_shape(Int<2>{}, Int<kLaneKeys>{}));
  auto p = cute::make_tensor<cutlass::float_e4m3_t>(Int<2 * kLaneKeys>{});
  // A column of O, and one of row sums.
  auto out = cute::make_tensor<float>(cute::make_shape(Int<2>{}, Int<2>{}));
  cute::clear(out);
  double sums[2][2] = {};
  float reference[2];
  bool has_sums = false;
  int tiles = kTilesAtOnce - 1;
  auto load = [&](int tile) {
    for (int r = 0; r < 2; ++r) {
      for (int key = 0, c = 0; key < kKeys; ++key) {
        if (lane_of(key) == lane) scores(r, c++) = rows[r].logits[tile][key];
      }
    }
  };
  auto multiply = [&](int tile) {
    for (int r = 0; r < 2; ++r) {
      for (int key = 0, c = 0; key < kKeys; ++key) {
        if (lane_of(key) == lane) weights[r][key] = static_cast<float>(p(in_p(r, c++)));
      }
    }
    lanes_meet.arrive_and_wait();
    for (int r = 0; r < 2; ++r) {
      const float* values = rows[r].values[tile].data();
      for (int c = 0; c < 2; ++c) {
        float terms[kKeys];
        for (int k = 0; k < kKeys; ++k)
          terms[k] = weights[r][k] * (c == 0 ? values[k] : kRowSumFactor);
        for (int k = 0; k < kKeys; k += 32) {
          out(r, c) = static_cast<float>(product(out(r, c), terms + k, 32));
        }
      }
    }
    lanes_meet.arrive_and_wait();
  };
  auto total = [&](int r, int c) -> double {
    if (!has_sums) return out(r, c);
    return out(r, c) +
           sums[r][c] * softmax.change_of_reference(reference[r], softmax.reference[r], scale);
  };
  load(0);
  softmax.begin(scores, NoShift{}, segment);
  softmax.make_first(scores, NoShift{}, p, segment);
  const int num_tiles = static_cast<int>(rows[0].logits.size());
  for (int tile = 1; tile < num_tiles; ++tile) {
    multiply(tile - 1);
    load(tile);
    softmax.before_o(scores, NoShift{}, segment);
    softmax.after_o(out);
    if (++tiles == kTilesAtOnce) {
      for (int r = 0; r < 2; ++r) {
        for (int c = 0; c < 2; ++c) {
          sums[r][c] = total(r, c);
          out(r, c) = 0.0f;
        }
        reference[r] = softmax.reference[r];
      }
      has_sums = true;
      tiles = 0;
      softmax.follow(segment, {static_cast<float>(sums[0][1]), static_cast<float>(sums[1][1])});
    }
    softmax.update(scores, NoShift{}, p, out, segment, [] {});
  }
  multiply(num_tiles - 1);
  for (int r = 0; r < 2; ++r) o[r] = total(r, 0) / (total(r, 1) / kRowSumFactor);
}

double exact(const Row& row) {
  double o = 0.0, sum = 0.0;
  for (std::size_t tile = 0; tile < row.logits.size(); ++tile) {
    for (int key = 0; key < kKeys; ++key) {
      const double weight = std::exp(double{row.logits[tile][key]});
      sum += weight;
      o += weight * row.values[tile][key];
    }
  }
  return o / sum;
}

double largest_error(const Row (&rows)[2]) {
  double o[kLanes][2];
  std::vector<std::thread> lanes;
  for (int l = 0; l < kLanes; ++l) {
    lanes.emplace_back([&, l] { run_lane(l, rows, o[l]); });
  }
  for (std::thread& one : lanes) one.join();
  double largest = 0.0;
  for (int r = 0; r < 2; ++r) {
    const double error = std::fabs(o[0][r] - exact(rows[r]));
    if (!(error <= largest)) largest = error;
  }
  return largest;
}

}  // namespace

int main() {
  std::mt19937 random(5);
  for (int tiles : {2, 9, 18, 160}) {
    for (float deviation : {0.3f, 1.0f, 3.0f, 8.0f}) {
      for (float logit : {6.0f, 8.0f, 10.0f, 12.0f}) {
        double largest = 0.0;
        for (int place : {0, 1, 3, 8}) {
          if (place >= tiles || (tiles > 18 && place > 0)) continue;
          std::normal_distribution<float> normal(0.0f, deviation);
          Row rows[2];
          for (Row& row : rows) {
            row.logits.assign(tiles, std::vector<float>(kKeys));
            row.values.assign(tiles, std::vector<float>(kKeys, 1.0f));
            for (auto& tile : row.logits) {
              for (float& x : tile) x = normal(random);
            }
          }
          rows[0].logits[place][37] = logit + (deviation > 1.0f ? 2.0f * deviation : 0.0f);
          rows[0].values[place][37] = 0.0f;
          // The second row has no key in its first tile, or few.
          const int kept = place == 1 ? 0 : 5;
          std::fill(rows[1].logits[0].begin() + kept, rows[1].logits[0].end(), -INFINITY);
          std::fill(rows[1].values[0].begin(), rows[1].values[0].begin() + kept, 0.0f);
          const double error = largest_error(rows);
          if (!(error <= largest)) largest = error;
        }
        std::printf("%d %g %g %.4f\n", tiles, deviation, logit, largest);
      }
    }
  }
}
