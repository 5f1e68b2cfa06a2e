# Everything that is found outside this repository, and nothing anywhere else.

set(components Interpreter)
if(PREFLASH_BINDINGS)
  list(APPEND components Development.Module)
endif()
find_package(Python 3.10 REQUIRED COMPONENTS ${components})

# Sets `result` to what `python -c code` prints, or to nothing where it fails.
function(preflash_ask_python result code)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" OUTPUT_VARIABLE answer
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(answer "")
  endif()
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

# pybind11, through the Python package of that name unless -Dpybind11_DIR says otherwise.
if(PREFLASH_BINDINGS)
  if(NOT pybind11_DIR)
    preflash_ask_python(cmake_dir "import pybind11; print(pybind11.get_cmake_dir())")
    if(NOT cmake_dir)
      message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11. Install it (pip install "
              "pybind11), choose another Python with -DPython_EXECUTABLE=<python>, or give "
              "-Dpybind11_DIR=<dir>.")
    endif()
    set(pybind11_DIR "${cmake_dir}" CACHE PATH "Directory of pybind11Config.cmake" FORCE)
  endif()
  set(PYBIND11_FINDPYTHON ON)
  find_package(pybind11 2.13 CONFIG REQUIRED)
endif()

# CUTLASS and CuTe are headers alone; the pinned version is in third_party/README.md.
if(PREFLASH_CUDA)
  set(PREFLASH_CUTLASS_VERSION 4.2)
  if(NOT PREFLASH_CUTLASS_DIR)
    preflash_ask_python(cutlass_dir "import importlib.util as u, pathlib as p
print(p.Path(u.find_spec('cutlass_library').origin).parent / 'source' / 'include')")
    set(PREFLASH_CUTLASS_DIR "${cutlass_dir}" CACHE PATH "Include directory of CUTLASS" FORCE)
  endif()
  set(version_header ${PREFLASH_CUTLASS_DIR}/cutlass/version.h)
  if(NOT EXISTS ${version_header})
    message(FATAL_ERROR "No CUTLASS headers in '${PREFLASH_CUTLASS_DIR}'. Install them with `pip "
            "install --no-deps nvidia-cutlass==4.2.0.0`, or give -DPREFLASH_CUTLASS_DIR=<include>.")
  endif()
  file(STRINGS ${version_header} version_lines REGEX "#define CUTLASS_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+);[^0-9]*([0-9]+)" "\\1.\\2" found "${version_lines}")
  if(NOT found VERSION_EQUAL PREFLASH_CUTLASS_VERSION)
    message(WARNING "CUTLASS ${found} in ${PREFLASH_CUTLASS_DIR}; the kernels were written and "
            "tested with ${PREFLASH_CUTLASS_VERSION}")
  endif()
  add_library(preflash_cutlass INTERFACE)
  target_include_directories(preflash_cutlass SYSTEM INTERFACE ${PREFLASH_CUTLASS_DIR})
endif()

# Prebuilt kernel libraries: what `make kernels` writes.
if(PREFLASH_KERNELS)
  file(GLOB PREFLASH_PREBUILT_LIBRARIES ${PREFLASH_KERNELS}/libpreflash_kernels_*.so)
  if(NOT EXISTS ${PREFLASH_KERNELS}/libpreflash_kernels_common.so
     OR NOT EXISTS ${PREFLASH_KERNELS}/variants.json)
    message(FATAL_ERROR "PREFLASH_KERNELS=${PREFLASH_KERNELS} must hold variants.json and "
            "libpreflash_kernels_*.so, as `make kernels OUT=<dir>` writes them.")
  endif()
endif()
