"""The loop finder behind `make arm-report`, on small disassemblies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from arm_loops import Loop, find_bound, find_loops, find_shape, parse_functions

TOOL = Path(__file__).parents[1] / "tools/arm_report.py"

# Two rows of activations, each four lanes long, times one line of four rows of weights; a loop
# around it, and another function right behind.
PRODUCT = """
0000000000000010 <product@@Base>:
  10:\tmov\tx0, #0x8                   \t// #8
  14:\tmovi\tv0.4s, #0x0
  18:\tldp\tq4, q5, [x1], #32
  1c:\tldr\tq6, [x2], #16
  20:\tsdot\tv0.4s, v6.16b, v4.4b[0]
  24:\tsdot\tv1.4s, v6.16b, v5.4b[0]
  28:\tushr\tv6.16b, v6.16b, #4
  2c:\tsdot\tv0.4s, v6.16b, v4.4b[1]
  30:\tsdot\tv1.4s, v6.16b, v5.4b[1]
  34:\tcbz\tx9, 3c <product@@Base+0x2c>
  38:\tadd\tx8, x8, #0x1
  3c:\tb.ne\t18 <product@@Base+0x8>  // b.any
  40:\tscvtf\tv0.4s, v0.4s
  44:\tcbnz\tx0, 14 <product@@Base+0x4>
  48:\tret

000000000000004c <behind>:
  4c:\tb\t10 <product@@Base>
"""


def loops_of(disassembly: str) -> list[Loop]:
    return [
        loop
        for name, instructions in parse_functions(disassembly).items()
        for loop in find_loops(name, instructions)
    ]


def test_only_the_innermost_loop_is_found_with_what_lies_around_it() -> None:
    (loop,) = loops_of(PRODUCT)
    assert loop.function == "product"
    assert [loop.body[0].address, loop.body[-1].address] == [0x18, 0x3C]
    assert [i.address for i in loop.before] == [0x14]
    assert [i.address for i in loop.after] == [0x40, 0x44]
    assert len(loop.with_surroundings(8)) == 1 + 8 * len(loop.body) + 2


def test_a_loop_with_nothing_around_it_has_no_surroundings() -> None:
    (loop,) = loops_of("0000 <f>:\n   0:\tsdot\tv0.4s, v1.16b, v2.16b\n   4:\tb.ne\t0 <f>\n")
    assert (loop.macs, loop.before, loop.after) == (16, (), ())


def test_products_are_counted_and_their_rows_and_columns_found() -> None:
    (loop,) = loops_of(PRODUCT)
    shape = find_shape(loop.body)
    assert (loop.macs, shape.num_rows, shape.num_cols) == (64, 2, 8)


def test_a_matrix_product_takes_weights_second() -> None:
    lines = ["ldr\tq7, [x1]", "ldp\tq8, q9, [x2]"]
    lines += [f"smmla\tv{v}.4s, v7.16b, v{v}.16b" for v in (8, 9)]
    text = "\n".join(f"  {4 * i:x}:\t{line}" for i, line in enumerate([*lines, "b.ne\t0 <f>"]))
    (loop,) = loops_of(f"0000 <f>:\n{text}\n")
    shape = find_shape(loop.body)
    assert (loop.macs, shape.num_rows, shape.num_cols) == (64, 2, 8)


def test_widening_products_count_and_wider_ones_do_not() -> None:
    lines = (
        "smull\tv0.8h, v1.8b, v2.8b",
        "smlal2\tv0.8h, v1.16b, v2.16b",
        "smlal\tv4.4s, v5.4h, v6.4h",
        "mla\tv4.4s, v5.4s, v6.4s",
    )
    text = "\n".join(f"  {4 * i:x}:\t{line}" for i, line in enumerate(lines))
    assert [i.macs for i in parse_functions(f"0000 <f>:\n{text}\n")["f"]] == [8, 8, 0, 0]


def test_the_larger_bottleneck_is_named() -> None:
    report = """
      Resource Pressure       [ {} ]
      - N1UnitL  [ 0.05% ]
      - N1UnitV0  [ 51.18% ]
      - N1UnitV1  [ 51.00% ]
      Data Dependencies:      [ 18.85% ]
      - Register Dependencies [ 18.85% ]
    """
    assert find_bound(report.format("51.27%")) == "V0+V1 51 %"
    assert find_bound(report.format("2.00%")) == "latency 19 %"
    assert find_bound("No resource or data dependency bottlenecks discovered.") == "issue width"


def test_missing_tools_are_named_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOL], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "llvm-mca" in line
    assert "apt-get install llvm-19 gcc-aarch64-linux-gnu" in line
