/* What the static libstdc++ of newer distributions asks glibc for, where glibc is 2.28. Hidden in
   every library that it is linked into. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>

/* glibc 2.32: nonzero where the process has one thread. Zero is right for any process: atomics. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

/* glibc 2.36, for std::random_device. */
__attribute__((visibility("hidden"))) uint32_t arc4random(void) {
  uint32_t value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) abort();
  return value;
}

#ifdef __x86_64__
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif
/* glibc 2.33; before, a function of this name was in every program, and called this one. */
int __fxstat64(int version, int file, struct stat64* found);
__attribute__((visibility("hidden"))) int fstat64(int file, struct stat64* found) {
  return __fxstat64(STAT_VERSION, file, found);
}
