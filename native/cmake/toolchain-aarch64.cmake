# Cross build for AArch64 Linux with Debian's gcc-aarch64-linux-gnu; ctest runs it under qemu-user.
#   cmake -S native -B build/aarch64 --toolchain cmake/toolchain-aarch64.cmake
# QEMU_CPU in the environment chooses the CPU: max has i8mm and dotprod,
# neoverse-n1 and cortex-a76 dotprod, cortex-a72 and cortex-a53 neither.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
