"""Texts that show an exporter what a model's activations look like.

The user's file, or a small text of ours and text that the model itself writes: what it says most
readily is what it will be used for.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from edgellm._native import NativeModel, Sampling
from edgellm.errors import FormatError, ModelNotFoundError
from edgellm.text import Tokenizer

__all__ = ["Calibration", "encode_windows", "read_text", "write_own_text"]

MAX_TEXT_BYTES: Final = 256 << 20
_OPENING_TOKENS: Final = 16  # of our text, which the model continues
_IDs = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Token ids to calibrate on.

    Attributes:
        windows: (n, length) int32, each computed on its own.
        held_out: (m, length) int32, only to measure on.
        sha256: Of all of them, hexadecimal, for the model card.
        origin: "own" or the file's name.
    """

    windows: _IDs
    held_out: _IDs
    sha256: str
    origin: str


def read_text(path: Path | None) -> str:
    """The user's calibration text, or ours.

    Raises:
        ModelNotFoundError: There is no such file.
        FormatError: It is empty, not UTF-8 or larger than 256 MiB.
    """
    if path is None:
        return (resources.files("edgellm.exporters") / "calibration.txt").read_text("utf-8")
    if not path.is_file():
        raise ModelNotFoundError(f"calibration text {path}: no such file")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise FormatError(f"calibration text {path} is larger than {MAX_TEXT_BYTES} bytes: cut it")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"calibration text {path} is not UTF-8: byte {error.start}") from None
    if not text.strip():
        raise FormatError(f"calibration text {path} is empty")
    return text


def encode_windows(tokenizer: Tokenizer, text: str, bos: int | None, length: int) -> _IDs:
    """Cuts a text into windows.

    Args:
        tokenizer: The model's.
        text: Any length.
        bos: What every window begins with, if anything.
        length: Tokens of a window, BOS included.

    Returns:
        (n, length) int32; a rest that fills no window is left out.
    """
    ids = np.asarray(tokenizer.encode(text, add_bos=False), np.int32)
    own = length if bos is None else length - 1
    count = len(ids) // own
    windows = ids[: count * own].reshape(count, own)
    if bos is None:
        return windows
    return np.concatenate([np.full((count, 1), bos, np.int32), windows], axis=1)


def write_own_text(
    path: Path, openings: _IDs, count: int, length: int, bos: int | None, threads: int
) -> _IDs:
    """Lets the model write.

    Args:
        path: An `.edge` file of the model, any quantisation.
        openings: (n, at least 16) int32, whose first tokens it continues in turn.
        count: Windows to write.
        length: Tokens of a window, BOS included.
        bos: What a window begins with, if anything.
        threads: Threads to use, each for windows of its own.

    Returns:
        (count, length) int32, sampled at temperature 1; the same for every number of threads.
    """
    out = np.empty((count, length), np.int32)
    start = [] if bos is None else [bos]

    def write(first: int) -> None:
        with NativeModel(path, threads=1, kv="f16") as model:
            for number in range(first, count, threads):
                opening = openings[number % len(openings)]
                ids = start + opening[len(start) :][:_OPENING_TOKENS].tolist()
                sampling = Sampling(temperature=1.0, top_p=0.98, seed=number).to_struct()
                session = model.create_session(length)
                session.prefill(ids)
                while len(ids) < length:
                    ids += session.step(sampling)
                session.close()
                out[number] = ids[:length]

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))
    return out


def digest(*windows: _IDs) -> str:
    """SHA-256 of token ids, hexadecimal."""
    sha = hashlib.sha256()
    for ids in windows:
        sha.update(np.ascontiguousarray(ids, "<i4").tobytes())
    return sha.hexdigest()
