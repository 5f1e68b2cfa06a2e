# The vocabulary and the variant matrix (cpp/variants/*.toml) as headers and sources,
# and the options of the public calls as preflash/_check/calls.py and rules.py:
# cmake/codegen/generate.py lists them and writes them into the build tree at configure time. Sets
# PREFLASH_GENERATED (their directory, which is an include directory),
# PREFLASH_SOURCES_<family>, PREFLASH_ARCHS_<family>, PREFLASH_CUDA_FAMILIES and
# PREFLASH_VARIANTS_JSON.

set(PREFLASH_GENERATED ${PROJECT_BINARY_DIR}/generated)
set(codegen ${PROJECT_SOURCE_DIR}/cmake/codegen)
file(GLOB inputs CONFIGURE_DEPENDS cpp/variants/*.toml ${codegen}/*.py ${codegen}/templates/*.in)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${inputs})

set(families "")
set(generate ${Python_EXECUTABLE} -B ${codegen}/generate.py --preset ${PREFLASH_PRESET})
if(PREFLASH_CUDA)
  list(JOIN PREFLASH_ARCHS "," archs)
  list(APPEND generate --archs ${archs})
else()
  list(APPEND generate --families cpu)
endif()
execute_process(COMMAND ${generate} --list OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${generate} --write ${PREFLASH_GENERATED} COMMAND_ERROR_IS_FATAL ANY)

string(REGEX MATCHALL "[^\n]+" lines "${listing}")
foreach(line IN LISTS lines)
  string(REGEX MATCH "^([^\t]+)\t([^\t]*)\t([^\t]+)\t" prefix "${line}")
  set(family ${CMAKE_MATCH_1})
  if(NOT family IN_LIST families)
    list(APPEND families ${family})
    set(PREFLASH_SOURCES_${family} ${PREFLASH_GENERATED}/${family}/library.cpp)
    string(REPLACE "," ";" PREFLASH_ARCHS_${family} "${CMAKE_MATCH_2}")
  endif()
  list(APPEND PREFLASH_SOURCES_${family} ${PREFLASH_GENERATED}/${CMAKE_MATCH_3})
endforeach()
set(PREFLASH_CUDA_FAMILIES ${families})
list(REMOVE_ITEM PREFLASH_CUDA_FAMILIES cpu)
# What an earlier configuration built here of other families or sources must not pass for this
# build's.
file(GLOB stale ${PROJECT_BINARY_DIR}/lib/libpreflash_kernels_*.so ${PROJECT_BINARY_DIR}/report/sm*)
foreach(family common ${PREFLASH_CUDA_FAMILIES})
  list(FILTER stale EXCLUDE REGEX "/libpreflash_kernels_${family}\\.so$")
  foreach(source IN LISTS PREFLASH_SOURCES_${family})
    cmake_path(GET source STEM name)
    list(FILTER stale EXCLUDE REGEX "/${name}\\.(json|ptxas)$")
  endforeach()
endforeach()
if(stale)
  file(REMOVE ${stale})
endif()
message(STATUS "preflash: preset ${PREFLASH_PRESET}, families ${families}")

# Beside the kernel libraries too, so that a directory of them says what it holds.
if(PREFLASH_KERNELS)
  set(PREFLASH_VARIANTS_JSON ${PREFLASH_KERNELS}/variants.json)
else()
  set(PREFLASH_VARIANTS_JSON ${PREFLASH_GENERATED}/variants.json)
  configure_file(${PREFLASH_VARIANTS_JSON} ${PROJECT_BINARY_DIR}/lib/variants.json COPYONLY)
endif()
