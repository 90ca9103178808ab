"""x86-64 processors that lack what this one has, emulated: every instruction set works or says in
one line what is missing; nothing ends in an illegal instruction, and the bits stay the same.

`qemu-x86_64` raises SIGILL for an instruction that its CPU model does not have, and has no AVX-512.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm import LLM
from edgellm._native import kernels

# What a CPU model has, besides plain C.
CPUS: dict[str, set[str]] = {
    "Nehalem": set(),  # SSE4.2
    "SandyBridge": set(),  # AVX, but neither AVX2 nor FMA
    "Haswell": {"avx2"},
    "Haswell,-fma": set(),
    "max": {"avx2"},
}
PROMPT = list(range(3, 60))

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64 machines"),
    pytest.mark.skipif(
        shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64: install Debian's qemu-user"
    ),
]


def emulate(cpu: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Runs a program; qemu's own warnings about its CPU models are taken out of stderr."""
    arguments = ["qemu-x86_64", "-cpu", cpu, *map(str, command)]
    run = subprocess.run(arguments, capture_output=True, text=True)
    assert run.returncode >= 0, f"{command} was ended by signal {-run.returncode}: {run.stderr}"
    lines = run.stderr.splitlines(keepends=True)
    run.stderr = "".join(line for line in lines if not line.startswith("qemu-x86_64: warning"))
    return run


@pytest.mark.parametrize("cpu", CPUS)
def test_the_bits_are_those_of_this_machine_and_a_missing_instruction_set_is_one_line(
    cpu: str, tiny_edge_of: Callable[[str], Path], native_tool: Callable[[str], Path]
) -> None:
    digest, ids = native_tool("logits_digest"), ",".join(map(str, PROMPT))
    for path in map(tiny_edge_of, ("llama", "gemma3", "mixed", "transformed")):
        arguments = (path, ids, "", 1, 16, 3)  # with the best instruction set there is
        here = subprocess.run([digest, *map(str, arguments)], capture_output=True, text=True)
        assert here.returncode == 0, here.stderr
        assert emulate(cpu, digest, *arguments).stdout == here.stdout
    for isa in sorted({row.isa for row in kernels()} - {"ref"}):
        run = emulate(cpu, digest, path, "5", isa)
        if isa in CPUS[cpu]:
            assert (run.returncode, run.stderr) == (0, "")
        else:
            assert run.returncode == 1
            assert run.stderr.startswith(f"logits_digest: instruction set {isa} cannot be used: ")
            assert "lacks" in run.stderr
            assert run.stderr.count("\n") == 1


# The sampler has no instruction set of its own: the oldest and the newest CPU stand for all.
@pytest.mark.parametrize(
    ("cpu", "program"),
    [("Nehalem", "sampler_test"), ("max", "sampler_test"), ("Haswell", "kernels_test")],
)
def test_c_tests_pass(cpu: str, program: str, native_tool: Callable[[str], Path]) -> None:
    run = emulate(cpu, native_tool(program), "quick")
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_command_answers_on_a_cpu_without_avx(tiny_edge_of: Callable[[str], Path]) -> None:
    path = tiny_edge_of("llama")
    options = ("-n", 2, "--temperature", 0, "--json")
    command = (sys.executable, "-m", "edgellm", "run", path, "Hello", *options)
    run = emulate("Nehalem", *command)
    assert run.returncode == 0, run.stderr
    assert run.stderr == (
        "edgellm: this CPU has none of the fast instruction sets, answers are slow;"
        " see: edgellm kernels\n"
    )
    with LLM(path) as llm:
        here = llm.chat([{"role": "user", "content": "Hello"}], max_tokens=2)
    assert tuple(json.loads(run.stdout)["ids"]) == here.ids
    refused = emulate("Nehalem", *command, "--isa", "avx2")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "edgellm: instruction set avx2 cannot be used: this CPU or its operating system lacks"
        " AVX2, FMA or F16C\n"
    )
