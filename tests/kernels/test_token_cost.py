"""What a token costs, in numbers that are the same on every machine: memory taken, passes,
barriers, calls into the C library, bytes of weights, and the kernels that are chosen.

Speed is measured by `edgellm bench` and asserted nowhere; these numbers are what CI can hold.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ARCHITECTURES

from edgellm import LLM, SamplingParams
from edgellm._native import NativeModel, kernels, tensor_bytes
from edgellm._native.library import load
from edgellm.format import EdgeFile
from edgellm.types import TensorFormat

BARRIERS_PER_LAYER = 5
OTHER_BARRIERS = 2  # the last residual, the head
KV_F16, KV_INT8 = 1, 2  # elm_kv_format
KERNEL = re.compile(r"\belm_\w+__\w+")
ARM = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
EMULATED = [
    ("x86_64", "Nehalem", "ref", ("qemu-x86_64",), "native"),
    ("x86_64", "Haswell", "avx2", ("qemu-x86_64",), "native"),
    ("", "cortex-a72", "neon", ARM, "native-aarch64"),
    ("", "cortex-a76", "neon_dotprod", ARM, "native-aarch64"),
]


class Cost:
    """What native/tests/token_cost.c printed."""

    def __init__(self, command: list[object]) -> None:
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        lines = run.stdout.splitlines()
        pairs = [line.split() for line in lines if re.fullmatch(r"[a-z_]+ \S+", line)]
        self.kernels = sorted(value for name, value in pairs if name == "kernel")
        self.isa = next(value for name, value in pairs if name == "isa")
        self.counts = {name: int(value) for name, value in pairs if name not in ("kernel", "isa")}
        self.plan = lines[len(pairs) :]


def isas() -> list[str]:
    return sorted({row.isa for row in kernels() if row.is_supported})


@pytest.fixture(scope="session")
def cost(native_tool: Callable[[str], Path]) -> Callable[..., Cost]:
    return lambda *arguments: Cost([native_tool("token_cost"), *arguments])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_takes_no_memory_one_pass_and_the_barriers_of_the_plan(
    architecture: str, isa: str, tiny_edge_of: Callable[[str], Path], cost: Callable[..., Cost]
) -> None:
    path = tiny_edge_of(architecture)
    for threads, kv in ((1, KV_F16), (2, KV_F16), (2, KV_INT8)):
        found = cost(path, isa, threads, kv)
        layers = sum(" attention " in line for line in found.plan)
        barriers = sum(line.endswith(", barrier") for line in found.plan)
        assert barriers == BARRIERS_PER_LAYER * layers + OTHER_BARRIERS
        steps = found.counts["steps"]
        assert found.counts == {
            "session_allocations": 1,  # the one arena
            "token_allocations": 0,  # of a prompt and all tokens after it
            "prompt_passes": 3,  # 70 tokens in chunks of 32
            "steps": steps,
            "step_passes": steps,
            "step_barriers": steps * barriers,
        }


@pytest.mark.parametrize("isa", isas())
def test_each_op_has_the_golden_kernel_of_its_instruction_set(
    isa: str,
    tiny_edge_of: Callable[[str], Path],
    cost: Callable[..., Cost],
    golden: Callable[[str, str], None],
) -> None:
    found = cost(tiny_edge_of("qwen2"), isa)
    assert found.isa == isa
    golden(f"kernels_{isa}", "\n".join(found.kernels) + "\n")
    used = set(KERNEL.findall("\n".join(found.plan)))
    assert used <= set(found.kernels)
    with NativeModel(tiny_edge_of("qwen2"), isa=isa, threads=1) as model:
        assert model.plan().splitlines() == found.plan


@pytest.mark.parametrize(("machine", "cpu", "isa", "emulator", "build"), EMULATED)
def test_emulated_cpus_choose_the_golden_kernels_and_take_no_memory(
    machine: str,
    cpu: str,
    isa: str,
    emulator: tuple[str, ...],
    build: str,
    tiny_edge_of: Callable[[str], Path],
    native_tool: Callable[[str], Path],
    golden: Callable[[str, str], None],
) -> None:
    if machine and platform.machine() != machine:
        pytest.skip(f"build/native is for {platform.machine()}")
    program = native_tool("token_cost").parents[1] / build / "token_cost"
    if not program.exists() or shutil.which(emulator[0]) is None:
        pytest.skip(f"no {emulator[0]} or no build/{build}: run make test-c test-aarch64")
    found = Cost([*emulator, "-cpu", cpu, program, tiny_edge_of("llama"), "", 2])
    assert found.isa == isa
    golden(f"kernels_{isa}", "\n".join(found.kernels) + "\n")
    assert found.counts["token_allocations"] == 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixed"])
def test_a_token_reads_each_matrix_of_the_file_once(
    architecture: str, tiny_edge_of: Callable[[str], Path]
) -> None:
    path = tiny_edge_of(architecture)
    with NativeModel(path, threads=1) as model:
        plan, per_token = model.plan(), model.info.weight_bytes_per_token
    found = re.findall(r"([\w.]+) (E[458]) \((\d+), (\d+)\) elm_gemv", plan)
    planned = {
        name: tensor_bytes(TensorFormat[kind], int(rows), int(cols))
        for name, kind, rows, cols in found
    }
    assert len(planned) == len(found)
    assert sum(planned.values()) == per_token
    with EdgeFile.open(path) as file:
        in_file = {
            name: tensor.size
            for name, tensor in file.tensors.items()
            if tensor.format != TensorFormat.F32
        }
    if "head" in in_file:
        del in_file["embed"]  # of which a token reads one row
    assert planned == in_file


class _Counting:
    """Stands before the C library and counts the calls of each function."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(load(), name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call


def test_an_answer_is_one_call_per_chunk_of_the_prompt_and_one_per_token(
    tiny_edge_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Counting()
    monkeypatch.setattr("edgellm._native.model.load", lambda: library)
    with LLM(tiny_edge_of("llama"), threads=1) as llm:
        session = llm.session()
        for tokens in (1, 5, 40):
            session.generate([1], SamplingParams(), max_tokens=1)  # the session is made, and reset
            chunk = session._info.chunk_length
            library.calls.clear()
            prompt = [3 + i % 200 for i in range(2 * chunk + 1)]
            answer = session.generate(prompt, SamplingParams(), max_tokens=tokens)
            assert len(answer.ids) <= tokens
            assert library.calls == {
                "elm_session_get_info": 1,
                "elm_session_truncate": 1,
                "elm_session_prefill": 3,
                "elm_session_step": len(answer.ids),
            }
