"""Finds the inner loops of AArch64 code and counts their cycles with llvm-mca.

llvm-mca is a static model of a core: latencies, ports and issue width. It assumes that every load
hits the first-level cache and every branch is predicted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MCA_NAMES = ("llvm-mca-19", "llvm-mca")
MCA_VERSION = 19  # the first with a model of every core below
STEPS = 200  # simulated repetitions


class ReportError(Exception):
    """What is missing, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A core that LLVM has a model of, and the cores it stands for."""

    mca: str
    title: str
    isas: tuple[str, ...]
    is_in_order: bool = False


# LLVM 19 gives A72, A76 and A78 the model of the A57. That suits the A72; A76 and A78 have the two
# vector pipes of the Neoverse N1 (the A76's server sibling), a dot product per cycle in each.
CORES = (
    Core(mca="cortex-a72", title="A72", isas=("neon",)),
    Core(mca="neoverse-n1", title="N1 (A76, A78)", isas=("neon", "neon_dotprod")),
    Core(mca="neoverse-n2", title="N2 (A710)", isas=("neon", "neon_dotprod", "neon_i8mm")),
    Core(
        mca="cortex-a510",
        title="A510",
        isas=("neon", "neon_dotprod", "neon_i8mm"),
        is_in_order=True,
    ),
)

# ---- loops ---------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"^[0-9a-f]+ <([^>@]+)[^>]*>:")
_INSTRUCTION = re.compile(r"^\s+([0-9a-f]+):\t([^/]+)")
_BRANCH = re.compile(r"^(?:b\.\w+|b|cbn?z|tbn?z)\t.*?\b([0-9a-f]+) <")
_VECTOR = re.compile(r"\b[vqdsbh](\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a disassembly; `target` is the address a branch goes to."""

    address: int
    text: str
    target: int | None

    @property
    def name(self) -> str:
        """The mnemonic."""
        return self.text.partition("\t")[0]

    @property
    def macs(self) -> int:
        """Products of 8-bit numbers it adds up."""
        if self.name in ("smmla", "ummla", "usmmla"):
            return 32
        if self.name in ("sdot", "udot", "usdot"):
            return 16 if "16b" in self.text else 8
        is_long = re.match(r"[su]ml[as]l2?|[su]mull2?", self.name) is not None
        return 8 if is_long and ".8h" in self.text.partition(",")[0] else 0

    @property
    def written(self) -> tuple[str, ...]:
        """Vector registers it changes."""
        if self.target is not None or self.name.startswith(("st", "prfm", "cmp", "fcmp")):
            return ()
        registers = _VECTOR.findall(self.text)
        return tuple(registers if self.name.startswith("ld") else registers[:1])

    @property
    def stored(self) -> tuple[str, ...]:
        """Whole vector registers it stores."""
        is_store = self.name.startswith("st")
        return tuple(re.findall(r"\bq\d+|v\d+\.16b", self.text)) if is_store else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """An innermost loop, and the loop right around it (`before` and `after` the inner one)."""

    function: str
    body: tuple[Instruction, ...]
    before: tuple[Instruction, ...]
    after: tuple[Instruction, ...]

    @property
    def macs(self) -> int:
        """Multiply-accumulates per iteration."""
        return sum(instruction.macs for instruction in self.body)

    def with_surroundings(self, repeats: int) -> tuple[Instruction, ...]:
        """One iteration of the loop around, in which the inner one makes `repeats`."""
        return (*self.before, *(self.body * repeats), *self.after)


def parse_functions(disassembly: str) -> dict[str, list[Instruction]]:
    """Instructions by function, of what objdump prints."""
    functions: dict[str, list[Instruction]] = {}
    name = ""
    for line in disassembly.splitlines():
        if header := _FUNCTION.match(line):
            name = header[1]
            functions[name] = []
        elif (found := _INSTRUCTION.match(line)) and name:
            text = found[2].strip()
            branch = _BRANCH.match(text)
            target = int(branch[1], 16) if branch else None
            functions[name].append(Instruction(address=int(found[1], 16), text=text, target=target))
    return functions


def find_loops(function: str, instructions: Sequence[Instruction]) -> list[Loop]:
    """The innermost loops: from a backward branch's target to the branch, no other within."""
    spans = [
        (instruction.target, instruction.address)
        for instruction in instructions
        if instruction.target is not None
        and instructions[0].address <= instruction.target <= instruction.address
    ]

    def within(first: int, last: int) -> tuple[Instruction, ...]:
        return tuple(i for i in instructions if first <= i.address <= last)

    loops = []
    for start, end in spans:
        if any(start <= s and e <= end and (s, e) != (start, end) for s, e in spans):
            continue
        around = [(s, e) for s, e in spans if s < start and end < e]
        outer_start, outer_end = min(
            around, key=lambda span: span[1] - span[0], default=(start, end)
        )
        loops.append(
            Loop(
                function=function,
                body=within(start, end),
                before=within(outer_start, start - 1),
                after=within(end + 1, outer_end),
            )
        )
    return loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one iteration of a product's loop covers."""

    num_rows: int  # of activations
    num_cols: int


def find_shape(body: Iterable[Instruction]) -> Shape:
    """The shape of a product, from how often each operand is used.

    Weights are sdot's first factor, whole where the other may be a lane, and smmla's second.
    """
    versions: dict[str, int] = {}
    weights, activations, products, is_matrix = set(), set(), 0, False
    for instruction in body:
        if instruction.macs:
            products += 1
            is_matrix = instruction.macs == 32
            _, *factors = re.findall(r"v(\d+)\.\w+(\S*)", instruction.text)
            (first, _), (second, lane) = reversed(factors) if is_matrix else factors
            weights.add((first, versions.get(first), instruction.name.endswith("2")))
            activations.add((second, versions.get(second), lane))
        for register in instruction.written:
            versions[register] = versions.get(register, 0) + 1
    return Shape(
        num_rows=round((2 if is_matrix else 1) * products / len(weights)),
        num_cols=round((8 if is_matrix else 4) * len(weights) * len(activations) / products),
    )


# ---- llvm-mca ------------------------------------------------------------------------------------


def run(command: Sequence[str | Path], text: str | None = None) -> str:
    """What a command prints.

    Raises:
        ReportError: It fails.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).strip().splitlines()
        cause = next((line for line in lines if "error" in line.lower()), *lines[:1])
        raise ReportError(f"{Path(command[0]).name} failed: {cause}")
    return done.stdout


def find_mca() -> str | None:
    """The llvm-mca to run; None if there is none, or only an old one."""
    for path in filter(None, map(shutil.which, MCA_NAMES)):
        version = re.search(r"version (\d+)", run([path, "--version"]))
        if version and int(version[1]) >= MCA_VERSION:
            return path
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a core spends on a sequence of instructions, repeated."""

    cycles: float
    bound: str


def simulate(mca: str, core: Core, instructions: Sequence[Instruction]) -> Cost:
    """Cycles per repetition, and what holds the core up."""
    lines = ["loop:", *(re.sub(r"\b[0-9a-f]+ <.*>", "loop", i.text) for i in instructions), ""]
    options = [f"-iterations={STEPS}", "-instruction-info=0", "-resource-pressure=0"]
    if not core.is_in_order:  # llvm-mca has no such analysis of those
        options.append("-bottleneck-analysis")
    text = run([mca, "-mtriple=aarch64", f"-mcpu={core.mca}", *options], "\n".join(lines))
    numbers = dict(re.findall(r"(Total Cycles|Block RThroughput):\s+([0-9.]+)", text))
    cycles, at_least = float(numbers["Total Cycles"]) / STEPS, float(numbers["Block RThroughput"])
    if core.is_in_order:
        is_late = cycles > 1.2 * at_least
        bound = f"latency: ports and width allow {at_least:.1f}" if is_late else "ports or width"
    else:
        bound = find_bound(text)
    return Cost(cycles=cycles, bound=bound)


def find_bound(text: str) -> str:
    """The larger of llvm-mca's bottlenecks, with the share of cycles it is felt in."""
    shares = re.findall(r"(?:- )?(\w[\w ]+?):?\s*\[ ([0-9.]+)% \]", text)
    share = {name: float(percent) for name, percent in shares}
    pressure, latency = share.get("Resource Pressure", 0.0), share.get("Data Dependencies", 0.0)
    if max(pressure, latency) == 0.0:
        return "issue width"
    if latency >= pressure:
        return f"latency {latency:.0f} %"
    units = {name: percent for name, percent in share.items() if "Unit" in name}
    busiest = [name for name, percent in units.items() if percent > 0.8 * max(units.values())]
    return f"{'+'.join(name.partition('Unit')[2] for name in busiest)} {pressure:.0f} %"
