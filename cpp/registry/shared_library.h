// dlopen and dlsym with errors as sentences.
#pragma once

#include <string>

namespace preflash {

// A symbol of a shared library, which stays loaded for the life of the process.
struct LoadedSymbol {
  void* address = nullptr;  // null: `error` says why
  std::string error = {};
};

LoadedSymbol load_symbol(const std::string& path, const char* symbol);

// The directory that holds the module this code is part of.
std::string own_directory();

}  // namespace preflash
