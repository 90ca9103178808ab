"""Backends are files that answer `probe()`; boards are TOML files with nothing unknown in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import devices
from edgellm.devices import cpu
from edgellm.errors import UnsupportedDeviceError

FOLDER = Path(devices.__path__[0])


def test_every_file_is_a_backend_and_answers() -> None:
    files = {path.stem for path in FOLDER.glob("[!_]*.py")}
    assert set(devices.backends()) == files == {"cpu", "fake"}
    for name in files:
        report = devices.probe(name)
        assert report.name == name
        assert report.is_available == (report.reason == "")
        assert report.num_threads >= report.num_cores >= 1
        assert 0 < report.available_bytes <= report.memory_bytes


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedDeviceError, match="cpu, fake"):
        devices.probe("cuda")
    with pytest.raises(UnsupportedDeviceError, match="raspberry-pi-5-8gb"):
        devices.profile("abacus")


@pytest.mark.parametrize("name", devices.profiles())
def test_every_profile_loads_and_names_its_source(name: str) -> None:
    profile = devices.profile(name)
    assert profile.name == name
    assert profile.memory_bytes > 1 << 28
    assert 1e9 < profile.bandwidth_bytes_per_s < 1e13
    assert profile.source


def machine(root: Path, cgroup: str = "", **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable: 6000 kB\n")
    (root / "proc/cpuinfo").write_text("processor : 0\nmodel name : Abacus 3000\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("siblings", "num_cores"),
    [({}, 4), ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, 2), ({0: "0", 1: "1", 2: "2", 3: "3"}, 4)],
)
def test_threads_of_one_core_are_one_core(
    siblings: dict[int, str], num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_cpus", lambda: {0, 1, 2, 3})
    root = machine(tmp_path)
    for number, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    report = cpu.probe(root)
    assert (report.num_threads, report.num_cores) == (4, num_cores)


def test_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    report = cpu.probe(machine(tmp_path))
    assert (report.memory_bytes, report.available_bytes) == (8000 * 1024, 6000 * 1024)
    assert report.description == "Abacus 3000"


def test_the_tightest_control_group_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/app/job\n",
        app__memory_DOT_max="4000000\n",
        app__memory_DOT_current="3000000\n",
        app__memory_DOT_stat="anon 2000000\ninactive_file 700000\nactive_file 300000\n",
        app__job__memory_DOT_max="max\n",
        app__job__memory_DOT_current="3000000\n",
    )
    report = cpu.probe(root)
    assert (report.memory_bytes, report.available_bytes) == (4_000_000, 2_000_000)


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "4:memory:/docker/abc\n1:cpu:/\n",
        memory__memory_DOT_limit_in_bytes="1000000\n",
        memory__memory_DOT_usage_in_bytes="1500000\n",
    )
    report = cpu.probe(root)
    assert (report.memory_bytes, report.available_bytes) == (1_000_000, 0)
