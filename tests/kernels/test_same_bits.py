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
from tiny_models import ARCHITECTURES, write_tiny_edge

from edgellm._native import kernels

MODELS = (*ARCHITECTURES, "mixed", "transformed")
IDS = ",".join(str(3 + 7 * i % 300) for i in range(70))
STEPS = "5"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu")


def digest(command: list[str], path: Path, isa: str, threads: int, chunk: int) -> str:
    """Digest of the logits of all of IDS and of STEPS tokens decoded after it."""
    arguments = [str(path), IDS, isa, str(threads), str(chunk), STEPS]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def emulator(cpu: str, native_tool: Callable[[str], Path]) -> list[str]:
    """The command that runs the AArch64 build of logits_digest on an emulated `cpu`."""
    emulated = native_tool("logits_digest").parents[1] / "native-aarch64/logits_digest"
    if not emulated.exists() or shutil.which(EMULATOR[0]) is None:
        pytest.skip("the AArch64 build is not there: run make test-aarch64")
    return [*EMULATOR, cpu, str(emulated)]


@pytest.mark.parametrize("architecture", MODELS)
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


@pytest.mark.parametrize("kv", [1, 2])  # elm_kv_format
@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_threads_that_share_a_head_give_the_same_bits(
    architecture: str, kv: int, tmp_path: Path, native_tool: Callable[[str], Path]
) -> None:
    path = write_tiny_edge(
        tmp_path,
        architecture,
        num_key_value_heads=1,
        num_attention_heads=12 if architecture == "llama" else 4,  # two tiles, one
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=300,  # begins inside a block
    )
    ids = ",".join(str(3 + 7 * i % 300) for i in range(340))
    isas = {row.isa for row in kernels() if row.is_supported and row.op.startswith("attention")}
    ways = [(isa, threads, 64) for isa in sorted(isas) for threads in (1, 2, 3, 5)]
    found = {}
    for isa, threads, chunk in [*ways, ("", 2, 1)]:
        arguments = (str(path), ids, isa, str(threads), str(chunk), STEPS, str(kv))
        run = subprocess.run(
            [native_tool("logits_digest"), *arguments], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        found[isa, threads, chunk] = run.stdout
    assert len(set(found.values())) == 1, found


# The sets of each: i8mm and dotprod, dotprod, neither.
@pytest.mark.parametrize(
    ("cpu", "isa"),
    [("max", ""), ("max", "neon_i8mm"), ("neoverse-n1", ""), ("cortex-a72", "")],
)
@pytest.mark.parametrize("architecture", MODELS)
def test_aarch64_gives_the_bits_of_this_machine(
    architecture: str,
    cpu: str,
    isa: str,
    tiny_edge_of: Callable[[str], Path],
    native_tool: Callable[[str], Path],
) -> None:
    emulated = emulator(cpu, native_tool)
    program, path = [str(native_tool("logits_digest"))], tiny_edge_of(architecture)
    expected = digest(program, path, "", 1, 0)
    assert digest(emulated, path, isa, 2, 16) == expected


@pytest.mark.parametrize(
    ("cpu", "isa", "lacking"),
    [("neoverse-n1", "neon_i8mm", "i8mm"), ("cortex-a72", "neon_dotprod", "asimddp")],
)
def test_aarch64_says_what_the_cpu_lacks(
    cpu: str,
    isa: str,
    lacking: str,
    tiny_edge_of: Callable[[str], Path],
    native_tool: Callable[[str], Path],
) -> None:
    arguments = [str(tiny_edge_of(ARCHITECTURES[0])), IDS, isa]
    run = subprocess.run([*emulator(cpu, native_tool), *arguments], capture_output=True, text=True)
    assert run.returncode == 1
    assert isa in run.stderr
    assert lacking in run.stderr
    assert run.stderr.count("\n") == 1
