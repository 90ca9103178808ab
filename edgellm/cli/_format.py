"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["format_bytes", "format_rounding", "table"]


def format_bytes(size: float) -> str:
    """For people: "98.4 MB", powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size:.0f} B"


def format_rounding(rounding: Mapping[str, Mapping[str, float]]) -> str:
    """What a quantised source lost: "re-rounded from Q4_0: qkv 4.3 % (relative RMS error)".

    Args:
        rounding: for each number type of the source and each kind of matrix its error, 0 for none.
    """
    parts = []
    for source, errors in rounding.items():
        lost = [f"{kind} {100 * error:.2g} %" for kind, error in errors.items() if error]
        kept = [kind for kind, error in errors.items() if not error]
        if lost:
            parts.append(f"re-rounded from {source}: {', '.join(lost)} (relative RMS error)")
        if kept:
            parts.append(f"carried over exactly from {source}: {', '.join(kept)}")
    return "; ".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table in the Markdown form that llama-bench prints.

    Args:
        head: the columns' names.
        rows: the cells.
        right: columns to align to the right.
    """
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(parts)} |"

    rule = [
        "-" * (width + 1) + ":" if i in right else "-" * (width + 2)
        for i, width in enumerate(widths)
    ]
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *[line(row) for row in rows]])
