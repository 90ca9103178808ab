"""`python -m edgellm` is the `edgellm` command."""

from __future__ import annotations

from edgellm.cli import main

if __name__ == "__main__":
    main()
