"""A source's options, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from edgellm.errors import UnsupportedModelError
from edgellm.format.spec import MAX_DIM

_REQUIRED: Any = object()


def shortest_float(value: float) -> float:
    """The shortest decimal that names the same float32: 0.1 for 0.100000001490116."""
    short = float(str(np.float32(value)))
    return int(short) if short.is_integer() and abs(short) < 2**24 else short


class Options:
    """Options of a model, from `config.json` or GGUF metadata.

    An option that is absent or null takes its value from `defaults`, then from the `default` given
    where it is read; without either it is an error. Values of the wrong type are errors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        where: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = values
        self._where = where
        self._prefix = prefix
        self._defaults = defaults or {}

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`."""
        value = self._values.get(self._prefix + key)
        if value is None:
            value = self._defaults.get(key, default)
        if value is _REQUIRED:
            raise UnsupportedModelError(f"{self._name(key)} is missing")
        return value

    def is_null(self, key: str) -> bool:
        """Whether the source says null, where that differs from saying nothing."""
        return self._values.get(self._prefix + key, _REQUIRED) is None

    def count(
        self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_DIM
    ) -> int:
        """A number of things, from `minimum` to `maximum`."""
        value = self.get(key, default)
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= maximum:
            raise self._wrong(key, value, f"a whole number from {minimum} to {maximum}")
        return int(value)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        if not is_real or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """A nested object; empty if absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def names(self, key: str, length: int, allowed: tuple[str, ...]) -> list[str] | None:
        """A list of `length` names out of `allowed`; None if absent."""
        value = self.get(key, None)
        if value is None:
            return None
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or any(one not in allowed for one in value):
            raise self._wrong(key, value, f"{length} names out of {', '.join(allowed)}")
        return list(value)

    def only(self, keys: tuple[str, ...]) -> None:
        """Refuses every option that is not one of `keys`."""
        for key in self._values:
            if key not in keys:
                raise UnsupportedModelError(
                    f"{self._name(key)} is not known; edgellm reads {', '.join(keys)}"
                )

    def require(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses every option that is present with a value other than the allowed ones."""
        for key, values in allowed.items():
            value = self.get(key, None)
            if value is None or any(value == one for one in values):
                continue
            only = " or ".join(repr(one) for one in values)
            raise UnsupportedModelError(
                f"{self._name(key)} is {_shown(value)}; edgellm supports "
                + (f"only {only}" if values else "only models without it")
            )

    def _name(self, key: str) -> str:
        return f"{self._where}: {self._prefix}{key}"

    def _wrong(self, key: str, value: Any, expected: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._name(key)} is {_shown(value)}, not {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
