"""Whether a model fits is said before memory is taken, with numbers."""

from __future__ import annotations

import pytest

from edgellm import devices
from edgellm.engine.memory import check_fit, largest_context, peak_memory_bytes
from edgellm.errors import OutOfMemoryError


def session_bytes(context: int) -> tuple[int, int]:
    return context * 1000, 50_000


def test_what_fits_is_accepted() -> None:
    check_fit(
        file_bytes=500_000,
        session_bytes=session_bytes,
        context=400,
        device=devices.probe("fake"),
    )


def test_what_does_not_fit_is_refused_with_a_context_that_would() -> None:
    with pytest.raises(OutOfMemoryError) as error:
        check_fit(
            file_bytes=500_000,
            session_bytes=session_bytes,
            context=8192,
            device=devices.probe("fake"),
        )
    for part in ("8192 tokens", "8.7 MB", "1.0 MB are available", "498 tokens would fit"):
        assert part in str(error.value)


def test_a_model_that_cannot_fit_says_so() -> None:
    with pytest.raises(OutOfMemoryError, match="no context would fit"):
        check_fit(
            file_bytes=2_000_000,
            session_bytes=session_bytes,
            context=1,
            device=devices.probe("fake"),
        )


@pytest.mark.parametrize("available", [0, 999, 1000, 64_999, 65_000, 10**9])
def test_the_largest_context_is_the_largest(available: int) -> None:
    found = largest_context(lambda length: length * 1000, 65, available)
    assert found == min(available // 1000, 65)


def test_the_peak_only_rises() -> None:
    before = peak_memory_bytes()
    block = bytearray(32 << 20)
    assert peak_memory_bytes() >= max(before, len(block))
