"""Where a model runs: backends that can be asked what they are, and profiles of boards.

A backend is one file here with a `probe()`; a board is one TOML file in `profiles/`.
"""

from __future__ import annotations

from edgellm.devices._registry import Profile, backends, probe, profile, profiles
from edgellm.devices._report import DeviceReport

__all__ = ["DeviceReport", "Profile", "backends", "probe", "profile", "profiles"]
