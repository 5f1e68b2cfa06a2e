# The CPU backend's sources. A file named *_avx2.cpp or *_avx512.cpp holds one instruction set's
# loops and is compiled for it alone; cpu/isa.cpp picks one at run time. Each set that the target
# and the compiler know is announced to the sources as PREFLASH_HAVE_AVX2, PREFLASH_HAVE_AVX512;
# the files of the others are left out.
include(CheckCXXCompilerFlag)

set(PREFLASH_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(PREFLASH_ISA_FLAGS_avx512 ${PREFLASH_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
    -mavx512bf16)

# Sets `result` to the sources of preflash_core's CPU backend and `definitions` to what announces
# them.
function(preflash_cpu_sources result definitions)
  file(GLOB sources CONFIGURE_DEPENDS cpp/cpu/*.cpp)
  set(have "")
  foreach(isa avx2 avx512)
    string(TOUPPER ${isa} name)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
      list(JOIN PREFLASH_ISA_FLAGS_${isa} " " flags)
      check_cxx_compiler_flag("${flags}" PREFLASH_COMPILES_${name})
    endif()
    set(of_isa ${sources})
    list(FILTER of_isa INCLUDE REGEX "_${isa}\\.cpp$")
    if(PREFLASH_COMPILES_${name})
      set_source_files_properties(${of_isa} PROPERTIES
                                  COMPILE_OPTIONS "${PREFLASH_ISA_FLAGS_${isa}}")
      list(APPEND have PREFLASH_HAVE_${name}=1)
    else()
      list(REMOVE_ITEM sources ${of_isa})
    endif()
  endforeach()
  set(${result} "${sources}" PARENT_SCOPE)
  set(${definitions} "${have}" PARENT_SCOPE)
endfunction()
