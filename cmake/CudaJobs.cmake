# The number of CUDA sources to compile at once.

# Sets `result` to the memory that this build may use, in MiB. limit_files: files that may contain a
# limit in bytes, as a container's cgroup has (a word such as "max" is no limit).
function(preflash_memory_mib result limit_files)
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
  foreach(file IN LISTS limit_files)
    if(EXISTS ${file})
      file(READ ${file} limit)
      string(STRIP "${limit}" limit)
      if(limit MATCHES "^[0-9]+$")
        math(EXPR limit "${limit} / 1048576")
        if(limit LESS memory)
          set(memory ${limit})
        endif()
      endif()
    endif()
  endforeach()
  set(${result} ${memory} PARENT_SCOPE)
endfunction()

# Sets `result` to the cores that this process may use. nproc knows the CPU affinity of a container,
# but returns OMP_NUM_THREADS where that is set.
function(preflash_cores result)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env --unset=OMP_NUM_THREADS --unset=OMP_THREAD_LIMIT nproc
    OUTPUT_VARIABLE cores OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT cores MATCHES "^[1-9][0-9]*$")
    cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  endif()
  set(${result} ${cores} PARENT_SCOPE)
endfunction()

# Sets `result` to one job per core and per 8 GiB of memory, which a CUDA source may take; at least 1.
function(preflash_cuda_jobs result cores memory_mib)
  math(EXPR jobs "${memory_mib} / 8192")
  if(cores LESS jobs)
    set(jobs ${cores})
  endif()
  if(jobs LESS 1)
    set(jobs 1)
  endif()
  set(${result} ${jobs} PARENT_SCOPE)
endfunction()

# An explicit PREFLASH_CUDA_JOBS is kept.
if(NOT PREFLASH_CUDA_JOBS)
  preflash_cores(usable_cores)
  preflash_memory_mib(usable_mib
                      "/sys/fs/cgroup/memory.max;/sys/fs/cgroup/memory/memory.limit_in_bytes")
  preflash_cuda_jobs(PREFLASH_CUDA_JOBS ${usable_cores} ${usable_mib})
endif()
message(STATUS "preflash: ${PREFLASH_CUDA_JOBS} CUDA sources are compiled at once")
