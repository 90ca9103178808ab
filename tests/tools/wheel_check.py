"""Checks an installed wheel in an environment without torch and onnx; run from `make test-wheel`.

Export, verify, show and run a tiny model with the installed command.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tiny_models import write_tiny_model

COMMAND = Path(sysconfig.get_path("scripts")) / "edgellm"


def edgellm(*arguments: str) -> str:
    """Output of one command, which must succeed."""
    result = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"edgellm {' '.join(arguments)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def main() -> None:
    """Runs the checks and says what was checked."""
    present = [name for name in ("torch", "onnx") if importlib.util.find_spec(name)]
    if present:
        sys.exit(f"this environment holds {present}; the check means nothing here")
    spec = importlib.util.find_spec("edgellm")
    if spec is None or "site-packages" not in str(spec.origin):
        sys.exit(f"edgellm is not the installed wheel: {spec and spec.origin}")
    with tempfile.TemporaryDirectory() as folder:
        source = write_tiny_model(Path(folder) / "tiny", "llama")
        model = str(Path(folder) / "tiny.edge")
        edgellm("--help")
        edgellm("kernels")
        edgellm("export", str(source), "-o", model)
        edgellm("verify", model)
        edgellm("show", model, "--plan")
        edgellm("run", model, "Hello", "--max-tokens", "4")
    print("wheel: export, verify, show, run work without torch and onnx")


if __name__ == "__main__":
    main()
