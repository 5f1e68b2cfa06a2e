# Whether and how CUDA sources are compiled.

if(PREFLASH_KERNELS)
  set(cuda_default OFF)
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(cuda_default ON)
  else()
    set(cuda_default OFF)
    message(STATUS "preflash: no nvcc found, so the CPU backend alone is built")
  endif()
endif()
option(PREFLASH_CUDA "Compile the CUDA kernel libraries" ${cuda_default})
if(PREFLASH_CUDA AND PREFLASH_KERNELS)
  message(FATAL_ERROR "PREFLASH_CUDA=ON compiles the kernel libraries, PREFLASH_KERNELS takes "
          "prebuilt ones: choose one.")
endif()
if(NOT PREFLASH_CUDA AND NOT PREFLASH_BINDINGS AND NOT PREFLASH_CORE)
  message(FATAL_ERROR "PREFLASH_BINDINGS=OFF builds kernel libraries alone, which need "
          "PREFLASH_CUDA=ON and nvcc.")
endif()
if(NOT PREFLASH_CUDA)
  set(PREFLASH_WHY_NO_CUDA "PREFLASH_CUDA is OFF")
  if(NOT cuda_default)
    set(PREFLASH_WHY_NO_CUDA "no nvcc was found; put the CUDA toolkit's bin on PATH for them")
  endif()
  return()
endif()

# "90" is real code for sm_90 alone; "90+PTX" adds an intermediate form for newer GPUs.
function(preflash_cmake_archs result archs)
  set(list "")
  foreach(arch IN LISTS archs)
    if(arch MATCHES "^([0-9]+a?)\\+PTX$")
      list(APPEND list ${CMAKE_MATCH_1})
    elseif(arch MATCHES "^[0-9]+a?$")
      list(APPEND list ${arch}-real)
    else()
      message(FATAL_ERROR "PREFLASH_ARCHS: '${arch}' is not like 80, 90 or 90+PTX")
    endif()
  endforeach()
  set(${result} "${list}" PARENT_SCOPE)
endfunction()

preflash_cmake_archs(CMAKE_CUDA_ARCHITECTURES "${PREFLASH_ARCHS}")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
include(CudaJobs)
set_property(GLOBAL PROPERTY JOB_POOLS preflash_cuda=${PREFLASH_CUDA_JOBS})

# No --use_fast_math: it would let the compiler assume away the infinities of masked rows, and flush
# small numbers. The kernels name the fast instructions they want.
set(PREFLASH_CUDA_FLAGS --expt-relaxed-constexpr -Xcompiler=-Wall -Xfatbin=-compress-all)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  list(APPEND PREFLASH_CUDA_FLAGS --compress-mode=size)
endif()
if(PREFLASH_LINEINFO)
  list(APPEND PREFLASH_CUDA_FLAGS -lineinfo)
endif()

# libpreflash_kernels_<name>.so for `archs` out of the sources that follow. The CUDA runtime is
# linked statically and the driver is looked up at run time, so that it loads on a machine without a
# GPU.
function(preflash_add_kernel_library name archs)
  set(target preflash_kernels_${name})
  preflash_cmake_archs(cuda_archs "${archs}")
  add_library(${target} SHARED ${ARGN})
  set_target_properties(
    ${target} PROPERTIES CUDA_ARCHITECTURES "${cuda_archs}" JOB_POOL_COMPILE preflash_cuda
                         LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${PREFLASH_CUDA_FLAGS}>
                                           $<$<COMPILE_LANGUAGE:CXX>:${PREFLASH_WARNINGS}>)
  target_link_libraries(${target} PRIVATE preflash_headers CUDA::cudart_static)
  if(PREFLASH_TRACE)
    target_compile_definitions(${target} PRIVATE PREFLASH_TRACE)
  endif()
  if(PREFLASH_BUILD_REPORT)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
    set(report ${PROJECT_SOURCE_DIR}/cmake/compile_report.py ${PROJECT_BINARY_DIR}/report)
    set_target_properties(
      ${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE};${report}")
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION preflash/lib)
endfunction()

# An executable of tests/cpp against the common kernel library, run by ctest; 77 says "no GPU".
function(preflash_add_check source)
  cmake_path(GET source STEM name)
  add_executable(${name} ${source})
  set_target_properties(${name} PROPERTIES JOB_POOL_COMPILE preflash_cuda)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  target_link_libraries(${name} PRIVATE preflash_headers preflash_kernels_common
                                        CUDA::cudart_static)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endfunction()
