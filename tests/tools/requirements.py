"""Prints requirements of pyproject.toml, one a line, for pip.

    requirements.py GROUP...    `run` (dependencies), `build`, or the name of an extra

Lets the Makefile install what comes from the network apart from the project itself, so that the
project can be reinstalled offline.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

BUILD_TOOLS = ("cmake", "ninja", "scikit-build-core")


def requirements(group: str) -> list[str]:
    """Requirements of one group; the build tools are those that `dev` pins."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    if group == "run":
        return list(project["dependencies"])
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if group == "build":
        return [entry for entry in extras["dev"] if entry.partition("==")[0] in BUILD_TOOLS]
    return extras[group]


if __name__ == "__main__":
    print(*(entry for group in sys.argv[1:] for entry in requirements(group)), sep="\n")
