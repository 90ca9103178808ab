"""Work in progress is kept for the same export, and for one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm.errors import EdgeLLMError
from edgellm.exporters.workspace import Workspace


def test_a_workspace_keeps_its_work_only_for_the_same_task(tmp_path: Path) -> None:
    output = tmp_path / "model.edge"
    with Workspace(output, {"bits": 5.0}) as first:
        assert first.load("layer") is None
        first.save("layer", data=np.arange(5))
    with Workspace(output, {"bits": 5.0}) as again:
        found = again.load("layer")
        assert found is not None
        assert np.array_equal(found["data"], np.arange(5))
    with Workspace(output, {"bits": 6.0}) as other:
        assert other.load("layer") is None
        other.save("layer", data=np.arange(5))
        other.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_workspace_without_work_leaves_nothing(tmp_path: Path) -> None:
    with Workspace(tmp_path / "model.edge", {}) as workspace:
        workspace.path("fast.edge").touch()
    assert list(tmp_path.iterdir()) == []


def test_two_exports_to_one_output_do_not_mix_their_work(tmp_path: Path) -> None:
    output = tmp_path / "model.edge"
    with Workspace(output, {"bits": 5.0}) as first:
        first.save("layer", data=np.arange(5))
        with pytest.raises(EdgeLLMError, match=r"another export to .*model\.edge is at work"):
            Workspace(output, {"bits": 6.0})
        assert first.load("layer") is not None
    with Workspace(output, {"bits": 5.0}) as again:
        assert again.load("layer") is not None


def test_a_workspace_that_cannot_be_begun_is_not_kept_locked(tmp_path: Path) -> None:
    output = tmp_path / "model.edge"
    with Workspace(output, {"bits": 5.0}) as first:
        first.save("layer", data=np.arange(5))
        (first.folder / "foreign").mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="foreign"):
            Workspace(output, {"bits": 6.0})
