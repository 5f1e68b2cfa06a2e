# find_package(preflash): the target preflash::preflash.
get_filename_component(preflash_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET preflash::preflash)
  add_library(preflash::preflash SHARED IMPORTED)
  set_target_properties(preflash::preflash PROPERTIES
                        IMPORTED_LOCATION "${preflash_prefix}/lib/libpreflash.so"
                        INTERFACE_INCLUDE_DIRECTORIES "${preflash_prefix}/include")
endif()
