"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "table"]


def format_bytes(size: float) -> str:
    """For people: "98.4 MB", powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size:.0f} B"


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
