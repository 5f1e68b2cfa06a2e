// The hot path: what happens between Python's run() and the kernel.
#include <string>

#include "bindings/plan.h"

namespace preflash {
namespace {

[[noreturn]] void refuse_address(const char* name, const void* address) {
  throw std::invalid_argument(
      std::string(name) + " starts at an address that is " +
      std::to_string(reinterpret_cast<std::uintptr_t>(address) % 16) +
      " past a multiple of 16 bytes; kernels load 16 bytes at a time: make a contiguous copy");
}

void check_address(const char* name, const void* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) refuse_address(name, address);
}

}  // namespace

Launch::Launch(std::shared_ptr<const Plan> plan, const RunTensors& tensors)
    : plan_(std::move(plan)), services_(&services_of(plan_->device())), forward_(plan_->params()) {
  forward_.q = tensors.q;
  forward_.q.num_tokens = plan_->batch().qo_end();
  forward_.k = tensors.k;
  forward_.v = tensors.v;
  forward_.o = tensors.o;
  forward_.o.num_tokens = forward_.q.num_tokens;
  forward_.lse = tensors.lse;

  const ForwardKernel& kernel = plan_->kernel();
  combine_.o = forward_.o;
  combine_.lse = tensors.lse;
  combine_.o_dtype = plan_->options().q_dtype;
  combine_.requests = forward_.requests;
  combine_.merges = plan_->merges();
  combine_.num_merges = plan_->sizes().num_merges;
  combine_.tile_rows = rows_per_tile(kernel.variant.family, kernel.tile.m, forward_.group_size);
  combine_.group_size = forward_.group_size;
  combine_.head_dim_vo = forward_.head_dim_vo;
}

void Launch::run(const RunArguments& arguments) const {
  check_address("q", arguments.q);
  check_address("k", arguments.k);
  check_address("v", arguments.v);
  check_address("out", arguments.o);
  const PlanSizes& sizes = plan_->sizes();
  const PlanLayout& layout = plan_->layout();
  if (sizes.num_items == 0) return;

  ForwardParams forward = forward_;
  forward.q.data = const_cast<void*>(arguments.q);
  forward.k.data = arguments.k;
  forward.v.data = arguments.v;
  forward.o.data = arguments.o;
  forward.lse.data = arguments.lse;
  forward.lse.scale = arguments.lse_scale;
  forward.mask_bits = arguments.mask_bits;
  forward.partial_o = layout.partial_o.in(arguments.float_workspace);
  forward.partial_lse = layout.partial_lse.in(arguments.float_workspace);
  forward.sm_scale = arguments.sm_scale;
  forward.out_scale = arguments.out_scale;
  check_launch(services_->launch_forward(plan_->kernel(), forward, sizes.num_ctas, plan_->device(),
                                         arguments.stream),
               plan_->kernel().id);
  if (sizes.num_merges == 0) return;

  CombineParams combine = combine_;
  combine.o.data = forward.o.data;
  combine.lse = forward.lse;
  combine.partial_o = forward.partial_o;
  combine.partial_lse = forward.partial_lse;
  check_launch(services_->combine(combine, plan_->device(), arguments.stream), "combine");
}

}  // namespace preflash
