// The threads of the CPU backend: started when first needed, kept until the process ends, shared by
// all callers one call at a time.
#pragma once

namespace preflash::cpu {

// How many threads one call uses, the caller's included. Starts as the number of processors that
// this process may run on.
int num_threads();
// Throws std::invalid_argument below 1. Results do not depend on it.
void set_num_threads(int count);

// Calls function(context, i) for every i in [0, count), each once, handed out in rising order.
// Returns when all are done; rethrows one exception if any call threw.
using IndexedFunction = void (*)(const void* context, int index);
void parallel_for(int count, IndexedFunction function, const void* context);

template <class Body>
void parallel_for(int count, const Body& body) {
  parallel_for(
      count, [](const void* context, int index) { (*static_cast<const Body*>(context))(index); },
      &body);
}

}  // namespace preflash::cpu
