"""The logits are a function of the file and the ids: every way of computing them has the same bits.

The kernels themselves are compared row by row in native/tests/kernels_test.c; here they are whole
models, on this machine and, where it is built, on an emulated AArch64.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES

from edgellm._native import kernels

IDS = ",".join(str(3 + 7 * i % 300) for i in range(70))
STEPS = "5"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu")


def digest(command: list[str], path: Path, isa: str, threads: int, chunk: int) -> str:
    """Digest of the logits of all of IDS and of STEPS tokens decoded after it."""
    arguments = [str(path), IDS, isa, str(threads), str(chunk), STEPS]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instruction_sets_threads_and_chunks_give_the_same_bits(
    architecture: str,
    tiny_edge_of: Callable[[str], Path],
    native_tool: Callable[[str], Path],
) -> None:
    program, path = [str(native_tool("logits_digest"))], tiny_edge_of(architecture)
    isas = {row.isa for row in kernels() if row.is_supported}
    found = {
        (isa, threads, chunk): digest(program, path, isa, threads, chunk)
        for isa in sorted(isas)
        for threads in (1, 2, 5)  # 5: more than most test machines have, so that some sleep
        for chunk in (1, 7, 64, 512)
    }
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_aarch64_gives_the_bits_of_this_machine(
    architecture: str,
    cpu: str,
    tiny_edge_of: Callable[[str], Path],
    native_tool: Callable[[str], Path],
) -> None:
    emulated = native_tool("logits_digest").parents[1] / "native-aarch64/logits_digest"
    if not emulated.exists() or shutil.which(EMULATOR[0]) is None:
        pytest.skip("the AArch64 build is not there: run make test-aarch64")
    program, path = [str(native_tool("logits_digest"))], tiny_edge_of(architecture)
    expected = digest(program, path, "", 1, 0)
    # "" is the best that CPU has: dotprod on max, plain NEON on cortex-a72.
    assert digest([*EMULATOR, cpu, str(emulated)], path, "", 2, 16) == expected
