#include "registry/shared_library.h"

#include <dlfcn.h>
#include <unistd.h>

namespace preflash {
namespace {

std::string last_dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown error";
}

}  // namespace

LoadedSymbol load_symbol(const std::string& path, const char* symbol) {
  if (access(path.c_str(), F_OK) != 0) return {.error = path + " does not exist"};
  // Local: two libraries that carry the CUDA runtime statically must not see each other's copy.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {.error = path + " cannot be loaded: " + last_dl_error()};
  void* address = dlsym(library, symbol);
  if (address == nullptr) {
    return {.error = path + " is no preflash kernel library: " + last_dl_error()};
  }
  return {.address = address};
}

std::string own_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_directory), &info) == 0) return ".";
  std::string path = info.dli_fname;
  std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

}  // namespace preflash
