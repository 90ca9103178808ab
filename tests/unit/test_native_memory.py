"""The library's memory, seen through an allocator that watches what happens after a release."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref
from pathlib import Path

from edgellm._native import abi
from edgellm._native.library import load

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_POISON = 0xA5


class _Watcher:
    """Never gives memory back, but fills it; `is_clean` is False once somebody wrote to it."""

    def __init__(self) -> None:
        self._blocks: list[ctypes.Array[ctypes.c_char]] = []
        self._live: dict[int, int] = {}
        self._released: list[tuple[int, int]] = []
        self._callbacks = (_ALLOCATE(self._allocate), _RELEASE(self._release))
        allocate, release = (ctypes.cast(one, ctypes.c_void_p) for one in self._callbacks)
        self.allocator = abi.Allocator(allocate=allocate, release=release)

    def _allocate(self, _: int, size: int, alignment: int) -> int:
        block = ctypes.create_string_buffer(size + alignment)
        address = -(-ctypes.addressof(block) // alignment) * alignment
        self._blocks.append(block)
        self._live[address] = size
        return address

    def _release(self, _: int, address: int, size: int) -> None:
        assert self._live.pop(address) == size, "released with another size"
        ctypes.memset(address, _POISON, size)
        self._released.append((address, size))

    def is_clean(self) -> bool:
        return all(
            ctypes.string_at(address, size) == bytes([_POISON]) * size
            for address, size in self._released
        )

    def num_live(self) -> int:
        return len(self._live)


def test_a_session_may_outlive_its_model_and_all_memory_comes_back(
    tiny_edge_of: Callable[[str], Path],
) -> None:
    lib, watcher, error = load(), _Watcher(), abi.Error()
    options = abi.ModelOptions()
    lib.elm_model_options_default(byref(options))
    options.num_threads = 2
    options.allocator = ctypes.pointer(watcher.allocator)
    model, session = ctypes.c_void_p(), ctypes.c_void_p()
    path = str(tiny_edge_of("llama")).encode()
    assert lib.elm_model_open(path, byref(options), byref(model), byref(error)) == 0
    assert lib.elm_session_create(model, None, byref(session), byref(error)) == 0
    lib.elm_model_close(model)
    lib.elm_session_destroy(session)
    assert watcher.is_clean()
    assert watcher.num_live() == 0
