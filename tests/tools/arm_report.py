"""Counts cycles of the ARM loops without an ARM machine; `make arm-report`.

    arm_report.py [--peers FOLDER] [--markdown]

The NEON kernels are compiled as the build compiles them, their inner loops are found in the
disassembly and given to llvm-mca, a static model of a core. It knows latencies, ports and issue
width, assumes that every load hits the first-level cache and every branch is predicted, and says
nothing about tokens per second.

FOLDER holds unpacked packages of other projects (ARCHITECTURE.md says which); their loops are
counted alike. `cycles/byte` is per byte of codes that a loop reads; `bound by` is what llvm-mca
names, with the share of cycles it is felt in.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path

from arm_loops import (
    CORES,
    MCA_VERSION,
    Instruction,
    Loop,
    ReportError,
    find_loops,
    find_mca,
    find_shape,
    parse_functions,
    run,
    simulate,
)

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/arm-report"
OBJDUMP = "aarch64-linux-gnu-objdump"
SUPERBLOCK = 256
GROUP = 32
KLEIDI = "kai_kernel_matmul_clamp_f32_"
KERNELS = re.compile(r"/((?:gem[mv]_q8_e[458]|attention_q8|peak_i8)__(neon\w*))\.c$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A function of another project whose loop is counted."""

    project: str
    file: str
    function: str
    isa: str
    num_rows: int  # rows of activations
    weight_bytes: float
    inner_repeats: int = 0  # iterations of the inner loop per group of 32; 0: it has all the work


def _llama(function: str, isa: str, num_rows: int, weight_bytes: float) -> Peer:
    version = {"neon": "8.0", "neon_dotprod": "8.2", "neon_i8mm": "8.6"}[isa]
    return Peer(
        project="llama.cpp",
        file=f"libggml-cpu-armv{version}_1.so",
        function=f"ggml_{function}",
        isa=isa,
        num_rows=num_rows,
        weight_bytes=weight_bytes,
    )


def _kleidi(variant: str, isa: str, num_rows: int) -> Peer:
    return Peer(
        project="KleidiAI",
        file="libexecutorch_backend_xnnpack.so",
        function=f"{KLEIDI}{variant}",
        isa=isa,
        num_rows=num_rows,
        weight_bytes=0.5,
        inner_repeats=1,
    )


PEERS = (
    _llama("vec_dot_q4_0_q8_0", "neon", 1, 0.5),
    _llama("gemv_q4_0_4x4_q8_0", "neon_dotprod", 1, 0.5),
    _llama("gemm_q4_0_4x4_q8_0", "neon_dotprod", 16, 0.5),
    _llama("gemv_q8_0_4x4_q8_0", "neon_dotprod", 1, 1),
    _llama("gemm_q8_0_4x4_q8_0", "neon_dotprod", 4, 1),
    _llama("gemv_q4_0_4x8_q8_0", "neon_i8mm", 1, 0.5),
    _llama("gemm_q4_0_4x8_q8_0", "neon_i8mm", 16, 0.5),
    _kleidi("qai8dxp1x4_qsi4c32p4x4_1x4_neon_dotprod", "neon_dotprod", 1),
    _kleidi("qai8dxp4x4_qsi4c32p4x4_16x4_neon_dotprod", "neon_dotprod", 16),
    _kleidi("qai8dxp1x8_qsi4c32p4x8_1x4x32_neon_dotprod", "neon_dotprod", 1),
    _kleidi("qai8dxp4x8_qsi4c32p4x8_16x4x32_neon_i8mm", "neon_i8mm", 16),
)

# ---- what is counted -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A loop to count: `macs` and `weight_bytes` per repetition of `instructions`."""

    name: str
    part: str
    isa: str
    num_rows: int
    macs: int
    weight_bytes: float
    instructions: tuple[Instruction, ...]


def find_tools() -> str:
    """The llvm-mca to run.

    Raises:
        ReportError: Something is not installed.
    """
    mca = find_mca()
    packages = {} if mca else {f"llvm-mca {MCA_VERSION} or newer": f"llvm-{MCA_VERSION}"}
    for tool in ("aarch64-linux-gnu-gcc", OBJDUMP):
        if not shutil.which(tool):
            packages[tool] = "gcc-aarch64-linux-gnu"
    if packages or not mca:
        install = " ".join(dict.fromkeys(packages.values()))
        raise ReportError(f"needs {' and '.join(packages)} (Debian: apt-get install {install})")
    return mca


def compile_kernels() -> list[tuple[str, str, Path]]:
    """(op, isa, object file) of the NEON kernels, compiled as the cross build does.

    Raises:
        ReportError: A file does not compile.
    """
    options = ["-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "--toolchain"]
    toolchain = ROOT / "native/cmake/toolchain-aarch64.cmake"
    run(["cmake", "-S", ROOT / "native", "-B", BUILD, *options, toolchain])
    found = []
    for entry in loads((BUILD / "compile_commands.json").read_text("utf-8")):
        if name := KERNELS.search(entry["file"]):
            op, _, isa = name[1].partition("__")
            found.append((op, isa, Path(entry["output"])))
    targets = [os.path.relpath(path, BUILD) for _, _, path in found]
    run(["cmake", "--build", BUILD, "--target", *targets])
    return sorted(found)


def disassemble(path: Path, *options: str) -> dict[str, list[Instruction]]:
    """Instructions by function."""
    return parse_functions(run([OBJDUMP, "-d", "--no-show-raw-insn", *options, path]))


def our_rows(op: str, isa: str, functions: dict[str, list[Instruction]]) -> list[Row]:
    """The loops of a kernel: a few rows of activations and many, and a tile's expansion."""
    loops = [loop for name, body in functions.items() for loop in find_loops(name, body)]
    products = [(loop, find_shape(loop.body)) for loop in loops if loop.macs]
    if op.startswith("ge"):
        # A row without a partner in a matrix product is its own: a longer loop of the same shape.
        products.sort(key=lambda product: -len(product[0].body))
        by_rows = {shape.num_rows: (loop, shape) for loop, shape in products}
        products = [
            by_rows[m] for m in sorted(by_rows) if m == max(by_rows) or (m == 1 and "gemv" in op)
        ]
    rows: list[Row] = []
    for loop, shape in products:
        part = "inner loop"
        if op.startswith("attention"):  # the tile's scores come before its values
            part = "p.v" if any(row.num_rows == shape.num_rows for row in rows) else "q.k"
        row = Row(
            name=op,
            part=part,
            isa=isa,
            num_rows=shape.num_rows,
            macs=loop.macs,
            weight_bytes=loop.macs / shape.num_rows * _bytes_per_weight(loop),
            instructions=loop.body,
        )
        rows.append(row)
        if op.startswith("ge"):
            rows.append(_surrounded(row, loop, SUPERBLOCK // shape.num_cols, "superblock"))
    if op == "peak_i8":
        rows = [replace(row, num_rows=0, weight_bytes=0) for row in rows]
    return rows + [row for loop in loops for row in _expansion(op, isa, loop)]


def _bytes_per_weight(loop: Loop) -> float:
    """By how the loop unpacks: E4 shifts the high nibble down, E5 inserts it below a fifth bit."""
    text = "\n".join(i.text for i in loop.body)
    if re.search(r"^sri\tv.*#4$", text, re.MULTILINE):
        return 5 / 8
    return 1 / 2 if re.search(r"^ushr\tv.*#4$", text, re.MULTILINE) else 1


def _surrounded(row: Row, loop: Loop, repeats: int, part: str) -> Row:
    return replace(
        row,
        part=part,
        macs=row.macs * repeats,
        weight_bytes=row.weight_bytes * repeats,
        instructions=loop.with_surroundings(repeats),
    )


def _expansion(op: str, isa: str, loop: Loop) -> list[Row]:
    """The loop that makes codes int8: it multiplies bytes and stores what it unpacks."""
    if not any(re.match(r"m(ul|la|ls)\tv\d+\.16b", i.text) for i in loop.body):
        return []
    stored = sum(16 * len(i.stored) for i in loop.body)
    row = Row(
        name=op,
        part="expansion",
        isa=isa,
        num_rows=0,
        macs=0,
        weight_bytes=stored * _bytes_per_weight(loop),
        instructions=loop.body,
    )
    repeats = 4 * GROUP // stored  # for a group of 4 rows
    return [_surrounded(row, loop, repeats, "expansion") if repeats > 1 else row]


def peer_rows(folder: Path) -> list[Row]:
    """The loops of PEERS whose files lie in a folder of unpacked packages.

    Raises:
        ReportError: None is there.
    """
    rows = []
    for peer in PEERS:
        path = next(folder.rglob(peer.file), None)
        if path is None:
            continue
        functions = disassemble(path, f"--disassemble={peer.function}")
        loops = find_loops(peer.function, functions.get(peer.function, []))
        if not loops:
            raise ReportError(f"{path} has no {peer.function}")
        loop = max(loops, key=lambda loop: loop.macs)
        row = Row(
            name=f"{peer.project} {peer.function.removeprefix('ggml_').removeprefix(KLEIDI)}",
            part="inner loop",
            isa=peer.isa,
            num_rows=peer.num_rows,
            macs=loop.macs,
            weight_bytes=loop.macs / peer.num_rows * peer.weight_bytes,
            instructions=loop.body,
        )
        rows.append(row)
        if peer.inner_repeats:
            rows.append(_surrounded(row, loop, peer.inner_repeats, "group"))
    if not rows:
        raise ReportError(f"{folder} has none of {', '.join(sorted({p.file for p in PEERS}))}")
    return rows


def merge_equal(rows: Iterable[Row]) -> list[Row]:
    """One row for kernels that compile to the same loop."""
    merged: dict[tuple[str, str, tuple[str, ...]], Row] = {}
    for row in rows:
        key = (row.isa, row.part, tuple(i.text.partition(" <")[0] for i in row.instructions))
        first = merged.get(key)
        merged[key] = replace(first, name=f"{first.name}, {row.name}") if first else row
    return list(merged.values())


# ---- output --------------------------------------------------------------------------------------


def print_rows(mca: str, rows: Sequence[Row]) -> None:
    """One line per loop and core."""
    print(
        f"{'part':<10} {'M':>2} {'core':<13} {'instr.':>6} {'cycles':>7} {'MAC':>6} "
        f"{'MAC/cycle':>9} {'bytes':>6} {'cycles/byte':>11}  bound by"
    )
    titles = [f"{row.name} ({row.isa})" for row in rows]
    for row, title, before in zip(rows, titles, ["", *titles], strict=False):
        if title != before:
            print(f"\n{title}")
        for core in CORES:
            if row.isa not in core.isas:
                continue
            cost = simulate(mca, core, row.instructions)
            rate = f"{row.macs / cost.cycles:.1f}" if row.macs else "-"
            per_byte = f"{cost.cycles / row.weight_bytes:.3f}" if row.weight_bytes else "-"
            print(
                f"{row.part:<10} {row.num_rows or '-':>2} {core.title:<13} "
                f"{len(row.instructions):>6} {cost.cycles:>7.1f} {row.macs or '-':>6} {rate:>9} "
                f"{round(row.weight_bytes) or '-':>6} {per_byte:>11}  {cost.bound}",
                flush=True,
            )


def print_markdown(mca: str, rows: Sequence[Row]) -> None:
    """The table of ARCHITECTURE.md: whole superblocks where there are, `MAC/cycle, cycles/byte`."""
    print("| loop | M | " + " | ".join(core.title for core in CORES) + " |")
    print("| --- " * (2 + len(CORES)) + "|")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        if following and following.part in ("superblock", "group"):
            continue
        part = row.part if row.part in ("q.k", "p.v", "expansion") else ""
        cells = [f"{row.name} {part}".strip() + f" ({row.isa})", str(row.num_rows or "")]
        for core in CORES:
            if row.isa not in core.isas:
                cells.append("")
                continue
            cycles = simulate(mca, core, row.instructions).cycles
            rate = f"{row.macs / cycles:.1f}" if row.macs else "-"
            cells.append(rate + (f", {cycles / row.weight_bytes:.2f}" if row.weight_bytes else ""))
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Prints the report; one line on stderr and status 1 where something is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages")
    parser.add_argument("--markdown", action="store_true", help="the table of ARCHITECTURE.md")
    arguments = parser.parse_args()
    try:
        mca = find_tools()
        rows: list[Row] = []
        for op, isa, path in compile_kernels():
            rows += our_rows(op, isa, disassemble(path))
        rows = merge_equal(rows)
        if arguments.peers:
            rows += peer_rows(arguments.peers)
        (print_markdown if arguments.markdown else print_rows)(mca, rows)
    except ReportError as error:
        sys.exit(f"arm-report: {error}")


if __name__ == "__main__":
    main()
