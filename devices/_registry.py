"""Finds the backends and the board profiles by scanning this folder."""

from __future__ import annotations

import importlib
import importlib.resources
import pkgutil
import tomllib
from dataclasses import dataclass, fields

import edgellm.devices
from edgellm.devices._report import DeviceReport
from edgellm.errors import UnsupportedDeviceError

__all__ = ["Profile", "backends", "probe", "profile", "profiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A board as its maker describes it; nothing in it was measured by us.

    Attributes:
        name: the file's name.
        title: the board's full name.
        memory_bytes: fitted; the system and other programs take their part of it.
        bandwidth_bytes_per_s: peak of the memory interface.
        source: where the figures come from.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    source: str


def backends() -> list[str]:
    """Names of all backends, sorted."""
    modules = pkgutil.iter_modules(edgellm.devices.__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def probe(name: str) -> DeviceReport:
    """Asks backend `name` about its device.

    Raises:
        UnsupportedDeviceError: if there is no such backend.
    """
    if name not in backends():
        raise UnsupportedDeviceError(f"no device {name!r}; there are: {', '.join(backends())}")
    report: DeviceReport = importlib.import_module(f"edgellm.devices.{name}").probe()
    return report


def profiles() -> list[str]:
    """Names of all board profiles, sorted."""
    folder = importlib.resources.files("edgellm.devices") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def profile(name: str) -> Profile:
    """The profile of a board.

    Raises:
        UnsupportedDeviceError: if there is none of that name.
        ValueError: if the file has unknown or missing keys.
    """
    if name not in profiles():
        raise UnsupportedDeviceError(f"no board {name!r}; there are: {', '.join(profiles())}")
    file = importlib.resources.files("edgellm.devices") / "profiles" / f"{name}.toml"
    values = tomllib.loads(file.read_text(encoding="utf-8"))
    expected = {field.name for field in fields(Profile)} - {"name"}
    if values.keys() != expected:
        wrong = ", ".join(sorted(values.keys() ^ expected))
        raise ValueError(f"profiles/{name}.toml: unknown or missing: {wrong}")
    return Profile(name=name, **values)
