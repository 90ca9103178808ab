# File suffix -> instruction set -> compiler flags: the only place with -m flags. A file named
# <kernel>__<isa>.c is compiled with that set's flags, or left out on another architecture.

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set(ELM_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(ELM_ISA_FLAGS_avxvnni ${ELM_ISA_FLAGS_avx2} -mavxvnni)
  set(ELM_ISA_FLAGS_avx512vnni
      -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
      -mprefer-vector-width=512)
  set(ELM_ISA_FLAGS_amx ${ELM_ISA_FLAGS_avx512vnni} -mamx-tile -mamx-int8)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(ELM_ISA_FLAGS_neon -DELM_NEON)
  set(ELM_ISA_FLAGS_neon_dotprod -DELM_NEON -march=armv8.2-a+dotprod)
  set(ELM_ISA_FLAGS_neon_i8mm -DELM_NEON -march=armv8.2-a+dotprod+i8mm)
endif()
set(ELM_ISA_FLAGS_ref " ")

function(elm_select_isa_files list_name)
  set(kept "")
  foreach(source ${${list_name}})
    if(source MATCHES "__([a-z0-9_]+)\\.c$")
      set(isa "${CMAKE_MATCH_1}")
      if(NOT DEFINED ELM_ISA_FLAGS_${isa})
        continue()
      endif()
      if(NOT isa STREQUAL "ref")
        set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS
                                                           "${ELM_ISA_FLAGS_${isa}}")
      endif()
    endif()
    list(APPEND kept "${source}")
  endforeach()
  set(${list_name} "${kept}" PARENT_SCOPE)
endfunction()
