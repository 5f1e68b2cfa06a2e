// The threads of the CPU backend. Every caller works on its own job from the first moment; helper
// threads, started when first needed, running until the process ends, spread over all the jobs that
// are running.
#pragma once

namespace preflash::cpu {

// Calls function(context, i) for every i in [0, count), each once, handed out in rising order, on
// at most `num_threads` threads, the caller's included. Returns when all are done; rethrows one
// exception if any call threw, and throws where an InterruptScope asked for the end.
using IndexedFunction = void (*)(const void* context, int index);
void parallel_for(int count, int num_threads, IndexedFunction function, const void* context);

template <class Body>
void parallel_for(int count, int num_threads, const Body& body) {
  parallel_for(
      count, num_threads,
      [](const void* context, int index) { (*static_cast<const Body*>(context))(index); }, &body);
}

}  // namespace preflash::cpu
