"""A run of the benchmark beside a stored one: what counts as a difference, and what is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm import cli
from edgellm.engine.baseline import Run, compare, load_run, store_run
from edgellm.errors import FormatError

STORED = [100.0, 98.0, 102.0]  # median 100, range 4


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([100.0, 98.0, 102.0], "noise"),
        ([104.0, 103.0, 104.5], "noise"),  # as far as the stored range
        ([104.1, 103.0, 104.5], "faster"),
        ([95.9, 95.0, 96.5], "slower"),
        ([90.0, 79.0, 91.0], "noise"),  # its own range is 12
        ([90.0, 89.0, 91.0, 85.0, 94.0], "slower"),  # 9
        ([50.0, 50.0], "too few rounds"),
        ([50.0], "too few rounds"),
    ],
)
def test_a_difference_counts_if_it_is_larger_than_both_ranges(
    rounds: list[float], verdict: str
) -> None:
    assert compare(rounds, STORED).verdict == verdict
    mirrored = {"faster": "slower", "slower": "faster"}
    assert compare(STORED, rounds).verdict == mirrored.get(verdict, verdict)


def test_a_comparison_states_the_ratio_of_medians_and_both_ranges() -> None:
    found = compare([50.0, 49.0, 54.0], STORED)
    assert (found.ratio, found.spread, found.stored_spread) == (0.5, 0.1, 0.04)


def test_a_stored_run_comes_back_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new/run.json"
    assert load_run(path) is None
    speeds = {"prefill": (1.0, 2.0, 3.0), "decode": (4.0, 5.0, 6.5)}
    run = Run(date="2026-01-01", version="1", probe_gb_s=7.0, **speeds)
    store_run(path, run)
    assert load_run(path) == run
    good = json.loads(path.read_text())
    for text in (
        "{",
        "[]",
        "null",
        json.dumps(good | {"more": 1}),
        json.dumps(good | {"prefill": [1.0, 2.0]}),
        json.dumps(good | {"decode": [1.0, 2.0, 0.0]}),
        json.dumps(good | {"decode": [1.0, 2.0, "x"]}),
        json.dumps(good | {"decode": 3}),
        json.dumps(good | {"probe_gb_s": float("nan")}),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match="--save-baseline"):
            load_run(path)


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(
    tiny_edge_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    """Calls `edgellm bench` on a tiny model; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = str(tiny_edge_of("llama"))

    def call(*options: str) -> tuple[int, str, str]:
        fixed = ["bench", path, "-t", "1", "-p", "8", "-n", "4", "--isa", "ref"]
        monkeypatch.setattr(sys, "argv", ["edgellm", *fixed, *options])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        output = capsys.readouterr()
        return int(exit_.value.code or 0), output.out, output.err

    return call


def json_of(bench: Bench, *options: str) -> dict[str, Any]:
    code, out, err = bench("--json", *options)
    assert (code, err) == (0, "")
    result: dict[str, Any] = json.loads(out)
    return result


def test_the_first_run_is_kept_and_later_ones_are_compared_with_it(
    bench: Bench, tmp_path: Path
) -> None:
    assert json_of(bench, "-r", "2")["baseline"] is None  # too short to be kept
    first = json_of(bench, "-r", "3")
    (path,) = (tmp_path / "edgellm").iterdir()
    assert first["baseline"] == {"stored": str(path)}
    kept = path.read_bytes()
    assert json.loads(kept)["decode"] == first["decode_rounds_tok_s"]
    second = json_of(bench, "-r", "3")
    assert path.read_bytes() == kept
    compared = compare(second["decode_rounds_tok_s"], first["decode_rounds_tok_s"])
    assert second["baseline"]["decode"]["verdict"] == compared.verdict
    assert second["baseline"]["decode"]["ratio"] == compared.ratio
    _, text, _ = bench("-r", "1")
    assert text.count("too few rounds") == 2
    assert f"compared with        the run of {second['baseline']['date']}" in text
    json_of(bench, "-r", "3", "-d", "2")  # another test has a run of its own
    assert len(list((tmp_path / "edgellm").iterdir())) == 2


def test_the_baseline_is_replaced_when_asked_for(bench: Bench, tmp_path: Path) -> None:
    json_of(bench, "-r", "3")
    (path,) = (tmp_path / "edgellm").iterdir()
    path.write_text("{")
    code, out, err = bench("-r", "3")
    assert (code, out) == (1, "")
    assert err == f"edgellm: {path} is not a stored run; replace it with --save-baseline\n"
    again = json_of(bench, "-r", "3", "--save-baseline")
    assert json.loads(path.read_bytes())["prefill"] == again["prefill_rounds_tok_s"]
    for options, part in (
        (("-r", "2", "--save-baseline"), "needs -r 3"),
        (("--verify-cost", "--save-baseline"), "leave out"),
    ):
        code, _, err = bench(*options)
        assert code == 2
        assert part in err


def test_a_run_that_cannot_be_kept_is_printed_all_the_same(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "edgellm").write_text("a file where the folder should be")
    code, out, err = bench("-r", "3")
    assert code == 0
    assert "| tg4 |" in out.replace("  ", " ")
    assert err.count("\n") == 1
    assert err.startswith("edgellm: this run is not kept")
    assert bench("-r", "3", "--save-baseline")[0] == 1
