// A plan() that differs from the wrapper's last one in index arrays alone, as the steps of an
// engine do: checks of the arrays, kernel, work list, memory and copies in one call.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/execution_plan.h"
#include "bindings/host_arrays.h"

namespace preflash {

// The index arrays among a call's arguments.
enum class ArrayRole { kQoIndptr, kKvIndptr, kKvIndptrOnHost, kIndices, kLastPageLen, kKvLens };

class RepeatedPlan {
 public:
  // call: the function of the last plan(), identifies the meaning of its arguments. roles: (name,
  // position or -1, name of an ArrayRole) of its index arrays. plan, graph: of the wrapper after
  // that plan(): _wrappers.plan.Plan, and _wrappers.graph.GraphMode or None.
  RepeatedPlan(pybind11::object call, const pybind11::sequence& roles, pybind11::object plan,
               pybind11::object graph);

  // Keeps what the next call is compared with: constants, and which index arrays there are. False:
  // another argument is no constant, so that no call will be the same.
  bool remember(const pybind11::tuple& by_position, const pybind11::dict& by_name);

  // Plans and makes the plan the wrapper's. Returns false, and has changed nothing, where another
  // argument differs, an array is unusual or wrong, or anything else has to be decided again:
  // Python then plans, or says what is wrong.
  bool again(pybind11::handle wrapper, pybind11::handle call, const pybind11::tuple& by_position,
             const pybind11::dict& by_name);

 private:
  struct Role {
    std::string name;
    Py_ssize_t position;
    ArrayRole role;
  };
  struct Arrays {
    GivenArrays given;
    PyObject* kv_indptr_on_host = nullptr;  // read instead of given.kv_indptr
    PyObject* kv_lens = nullptr;            // a hint, or what runs read where there are bounds
  };
  struct NewPlan;

  const Role* role_at(Py_ssize_t position) const;
  const Role* role_of(PyObject* name) const;
  // False: another argument differs.
  bool find_arrays(const pybind11::tuple& by_position, const pybind11::dict& by_name,
                   Arrays* arrays) const;
  // Brings index arrays on the GPU to the host, in one copy for which it waits. Returns the copies.
  pybind11::list bring_to_host(const HostArrays& host_arrays, GivenArrays* given) const;
  // The request's PageList; None for ragged batches.
  pybind11::object page_list(const GivenArrays& given, const BatchOfArrays& found) const;
  std::optional<NewPlan> new_plan(const Arrays& arrays) const;
  // True if captured graphs, if there are any, read the lengths of keys there.
  bool may_read(PyObject* kv_lens) const;
  // False: what graphs have captured takes more than one place. where: null for new memory.
  bool find_buffer(const NewPlan& made, std::shared_ptr<PlanBuffer>* where) const;
  // True if what options first asked for in a capture would need is reserved.
  bool has_reserve(std::int64_t bytes) const;
  std::vector<HostCopy> copies_for_graphs(const Arrays& arrays, const Batch& batch) const;

  pybind11::object call_;
  std::vector<Role> roles_;
  pybind11::object plan_, graph_;
  // The request as the caller made it, and with the primary variant's options: begin_forward()
  // plans for others.
  pybind11::object request_, variant_request_;
  bool has_default_;  // the primary variant is that of a run() without options
  std::shared_ptr<ExecutionPlan> primary_;
  std::shared_ptr<Workspace> workspace_;
  Family family_;
  TensorMemory float_memory_;
  std::int64_t float_bytes_;
  std::int32_t graph_rows_;
  std::int64_t graph_mask_bytes_;
  AttentionOptions options_;  // of the primary variant, as asked
  pybind11::object kv_layout_;
  bool kv_lengths_are_upper_bounds_;
  // Positions of the fields of Plan, Request and PageList.
  struct {
    Py_ssize_t request, default_variant, primary, others, windows;
    Py_ssize_t batch, pages, kv_lens;
    Py_ssize_t given = 0, on_device = 0, largest = 0;
  } fields_;
  std::shared_ptr<PinnedAddresses> held_;  // null: no graphs
  pybind11::object graph_buffers_ = pybind11::none(), indices_buffer_ = pybind11::none();
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  pybind11::tuple by_position_;
  pybind11::dict by_name_;
};

// Keeps the results that were made of constant arguments of earlier calls.
class RememberedCalls {
 public:
  // None: no earlier call of this function had these arguments, or one is no constant.
  pybind11::object find(pybind11::handle call, const pybind11::tuple& by_position,
                        const pybind11::dict& by_name) const;
  // Keeps what `make` returns, of a call with nothing but constants. Forgets the oldest one where
  // there are many.
  void keep(pybind11::object call, pybind11::tuple by_position, pybind11::dict by_name,
            const pybind11::object& make);

 private:
  struct Remembered {
    bool same(pybind11::handle other_call, const pybind11::tuple& other_position,
              const pybind11::dict& other_name) const;

    pybind11::object call;
    pybind11::tuple by_position;
    pybind11::dict by_name;
    pybind11::object made;
  };
  using Calls = std::vector<Remembered>;

  std::shared_ptr<const Calls> calls() const;

  mutable Guard guard_;  // guards calls_
  std::shared_ptr<const Calls> calls_ = std::make_shared<Calls>();
};

}  // namespace preflash
