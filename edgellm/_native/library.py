"""Finding, loading and checking the C library."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import sys
from pathlib import Path

from edgellm._native import abi
from edgellm.errors import NativeError

__all__ = ["layouts", "load", "open_library", "trim_heap", "version"]

_FILE_NAMES = {"win32": "edgellm.dll", "darwin": "libedgellm.dylib"}


def open_library(path: Path) -> ctypes.CDLL:
    """Loads the C library at `path` and declares its functions.

    Args:
        path: the shared library.

    Returns:
        The library; calls into it release the interpreter lock.

    Raises:
        NativeError: if it cannot be loaded, lacks a function, or has another ABI version.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as err:
        raise NativeError(f"cannot load edgellm's C library: {err}; reinstall edgellm") from err
    for name, (result, arguments) in abi.PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError as err:
            raise NativeError(f"{path} lacks {name}; reinstall edgellm") from err
        function.restype = result
        function.argtypes = arguments
    found = library.elm_abi_version()
    if found != abi.ABI_VERSION:
        raise NativeError(
            f"{path} has ABI version {found}, this edgellm needs {abi.ABI_VERSION};"
            " reinstall edgellm"
        )
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The C library installed beside this package, loaded once.

    Raises:
        NativeError: if it is missing or does not fit this package.
    """
    name = _FILE_NAMES.get(sys.platform, "libedgellm.so")
    # Not Path(__file__): in an editable install the library lies in another folder.
    found = importlib.resources.files("edgellm") / "_native" / name
    if not found.is_file():
        raise NativeError(f"edgellm's C library is not at {found}; run: pip install .")
    return open_library(Path(str(found)))


def version() -> str:
    """Version of the C library, for example "0.1.0"."""
    text: bytes = load().elm_version()
    return text.decode()


def layouts() -> list[str]:
    """The struct layouts that the library itself reports, one line each."""
    library = load()
    text = ctypes.create_string_buffer(library.elm_abi_layout(None, 0) + 1)
    library.elm_abi_layout(text, len(text))
    return text.value.decode().splitlines()


def trim_heap() -> None:
    """Gives memory that was freed back to the system; does nothing where libc cannot.

    Source: malloc_trim(3). Reading SmolLM2's tokenizer.json leaves 15 MB behind with glibc 2.36.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
