"""`edgellm bench`."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgellm import __version__
from edgellm.cli import _store
from edgellm.cli._format import format_bytes, table

if TYPE_CHECKING:
    from edgellm._native import NativeModel, NativeSession
    from edgellm.engine.baseline import Run

__all__ = ["command"]

_SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """What is measured: lengths in tokens, and how often."""

    prompt: int
    gen: int
    depth: int
    repetitions: int


@click.command()
@_store.model_argument
@click.option("-p", "--n-prompt", "prompt", type=click.IntRange(1), default=512, show_default=True)
@click.option("-n", "--n-gen", "gen", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "-d", "--n-depth", "depth", type=click.IntRange(0), default=0, help="Tokens before the first."
)
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True)
@_store.threads_option
@click.option("--isa", help="Force an instruction set; see: edgellm kernels.")
@_store.kv_option
@click.option(
    "--verify-cost",
    is_flag=True,
    help="Measure passes of 1 to 16 tokens instead, and keep the result for this device.",
)
@click.option(
    "--save-baseline",
    is_flag=True,
    help="Keep this run as the one that later runs are compared with.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    prompt: int,
    gen: int,
    depth: int,
    repetitions: int,
    threads: int | None,
    isa: str | None,
    kv: str | None,
    verify_cost: bool,
    save_baseline: bool,
    as_json: bool,
) -> None:
    """Measure speed, with the columns and test names of llama-bench.

    pp512 computes a prompt of 512 random tokens, tg128 generates 128 tokens greedily and does not
    stop at an end-of-text token. "at d" is how many tokens precede them. A first run of each is
    not counted.

    The first run of 3 repetitions or more is kept for this device, model and way of running it;
    later ones are compared with it. A difference of the medians within the larger of the two
    ranges (fastest minus slowest repetition) is noise.
    """
    from edgellm._native import NativeModel
    from edgellm.engine.baseline import MIN_ROUNDS
    from edgellm.engine.tuning import tune_threads

    if verify_cost and _given("prompt", "gen", "depth", "save_baseline"):
        raise click.UsageError(
            "--verify-cost has lengths and a record of its own; leave out -p, -n, -d and"
            " --save-baseline"
        )
    if save_baseline and repetitions < MIN_ROUNDS:
        raise click.UsageError(f"--save-baseline needs -r {MIN_ROUNDS} or more")
    test = _Test(prompt=prompt, gen=gen, depth=depth, repetitions=repetitions)
    path = _store.resolve(model)
    name, parameters, prompt_weights = _describe(path)
    with NativeModel(path, threads=threads or 0, isa=isa, kv=kv) as native:
        if threads is None:
            tune_threads(native, _store.cache_folder())
        decode_threads, prefill_threads = native.threads
        if verify_cost:
            result, text = _verify_cost(native, repetitions), _verify_text
        else:
            result, text = _measure(native, prompt_weights, test, save_baseline), _text
        result = {
            "model": name,
            "path": str(path),
            "model_id": native.info.model_id,
            "size_bytes": native.info.weight_bytes,
            "num_parameters": parameters,
            "backend": "CPU",
            "isa": native.info.isa,
            "threads": native.info.num_threads,
            "decode_threads": decode_threads,
            "prefill_threads": prefill_threads,
            **result,
        }
    click.echo(json.dumps(result) if as_json else text(result))


def _given(*names: str) -> bool:
    context = click.get_current_context()
    return any(context.get_parameter_source(name) != ParameterSource.DEFAULT for name in names)


def _verify_cost(native: NativeModel, repetitions: int) -> dict[str, Any]:
    from edgellm import devices
    from edgellm.engine.verify_cost import VERIFY_DEPTH, measure_verify_cost, store_verify_cost

    seconds, kv_format = measure_verify_cost(native, repetitions)
    device = devices.probe("cpu").description
    stored = store_verify_cost(_store.cache_folder(), native, kv_format, device, seconds)
    return {
        "repetitions": repetitions,
        "n_depth": VERIFY_DEPTH,
        "seconds": seconds,
        "relative": [value / seconds[0] for value in seconds],
        "kv_format": kv_format,
        "stored": str(stored),
    }


def _verify_text(result: dict[str, Any]) -> str:
    cells = [
        (str(columns), f"{seconds * 1e3:.2f}", f"{relative:.2f}")
        for columns, (seconds, relative) in enumerate(
            zip(result["seconds"], result["relative"], strict=True), 1
        )
    ]
    return "\n".join(
        [
            f"{result['model']}, {result['backend']} {result['isa']}, {_threads(result)},"
            f" {result['n_depth']} tokens before, median of {result['repetitions']}",
            table(("columns", "ms", "V"), cells, (0, 1, 2)),
            f"stored in {result['stored']}",
        ]
    )


def _threads(result: dict[str, Any]) -> str:
    """Threads of passes of up to 4 columns, and of more if they differ."""
    counts = dict.fromkeys((result["decode_threads"], result["prefill_threads"]))
    return f"{' and '.join(map(str, counts))} threads"


def _measure(
    native: NativeModel, prompt_weights: int, test: _Test, save_baseline: bool
) -> dict[str, Any]:
    from edgellm import _native
    from edgellm.engine.baseline import Run, load_run
    from edgellm.engine.memory import peak_memory_bytes

    info = native.info
    length = test.depth + max(test.prompt, test.gen) + 2
    if length > info.max_context:
        raise ValueError(
            f"the tests need {length} tokens of context, the model has {info.max_context}"
        )
    session = native.create_session(length)
    kv_format = session.info().kv_format
    path = _baseline_path(native, kv_format, test)
    baseline = None if save_baseline else load_run(path)
    prefill, first, decode = _Runs(session, info.num_tokens, test).repeat(test.repetitions)
    peak = peak_memory_bytes()  # before the probe, which takes memory of its own
    session.close()
    probe = _native.probe_read(info.weight_bytes_per_token, info.num_threads)
    peak_ops = _native.probe_int8(info.isa, info.num_threads)
    prefill_tok_s = [test.prompt / seconds for seconds in prefill]
    decode_tok_s = [test.gen / seconds for seconds in decode]
    run = Run(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        prefill=tuple(prefill_tok_s),
        decode=tuple(decode_tok_s),
        probe_gb_s=probe / 1e9,
    )
    read = statistics.median(decode_tok_s) * info.weight_bytes_per_token
    prefill_ops = 2 * prompt_weights * statistics.median(prefill_tok_s)
    return {
        "n_prompt": test.prompt,
        "n_gen": test.gen,
        "n_depth": test.depth,
        "repetitions": test.repetitions,
        "kv_format": kv_format,
        "prefill_rounds_tok_s": prefill_tok_s,
        "decode_rounds_tok_s": decode_tok_s,
        "prefill_tok_s": statistics.median(prefill_tok_s),
        "prefill_sd": _sd(prefill_tok_s),
        "decode_tok_s": statistics.median(decode_tok_s),
        "decode_sd": _sd(decode_tok_s),
        "ttft_ms": statistics.median(first) * 1e3,
        "peak_rss_bytes": peak,
        "bytes_per_token": info.weight_bytes_per_token,
        "decode_gb_s": read / 1e9,
        "probe_gb_s": probe / 1e9,
        "decode_share": read / probe,
        "prefill_gop_s": prefill_ops / 1e9,
        "int8_peak_gop_s": peak_ops / 1e9,
        "prefill_share": prefill_ops / peak_ops,
        "baseline": _keep(path, run, save_baseline) if baseline is None else _beside(run, baseline),
    }


def _baseline_path(native: NativeModel, kv_format: str, test: _Test) -> Path:
    from edgellm import devices
    from edgellm.engine._store import store_path

    lengths = (f"pp{test.prompt}", f"tg{test.gen}", f"d{test.depth}")
    device = devices.probe("cpu").description
    return store_path(_store.cache_folder(), "bench", native, kv_format, device, *lengths)


def _keep(path: Path, run: Run, is_asked: bool) -> dict[str, Any] | None:
    """Stores the run if it is long enough; that it cannot be is an error only if it was asked."""
    from edgellm.engine.baseline import MIN_ROUNDS, store_run

    if len(run.prefill) < MIN_ROUNDS:
        return None
    try:
        store_run(path, run)
    except OSError as err:
        if is_asked:
            raise
        click.echo(f"edgellm: this run is not kept to compare with: {err}", err=True)
        return None
    return {"stored": str(path)}


def _beside(run: Run, baseline: Run) -> dict[str, Any]:
    from edgellm.engine.baseline import compare

    return {
        "date": baseline.date,
        "version": baseline.version,
        "prefill": asdict(compare(run.prefill, baseline.prefill)),
        "decode": asdict(compare(run.decode, baseline.decode)),
        "probe_ratio": run.probe_gb_s / baseline.probe_gb_s,
    }


class _Runs:
    """Times prompts and generations on one session."""

    def __init__(self, session: NativeSession, num_tokens: int, test: _Test) -> None:
        from edgellm._native import Sampling

        self._session = session
        self._gen = test.gen
        self._chunk = session.info().chunk_length
        draw = random.Random(_SEED)
        self._before = draw.choices(range(num_tokens), k=test.depth)
        self._prompt = draw.choices(range(num_tokens), k=test.prompt)
        self._greedy = Sampling().to_struct()

    def repeat(self, times: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds of prompts, of prompts with a first token, and of generations."""
        prefill, first, decode = [], [], []
        for _ in range(times + 1):
            self._start()
            whole = perf_counter()
            prefill.append(_seconds(self._compute_prompt))
            self._session.step(self._greedy)
            first.append(perf_counter() - whole)
        for _ in range(times + 1):
            self._start()
            # The first token needs no pass of its own if the context is not empty; so that `gen`
            # passes are timed, it is sampled before the clock starts.
            if not self._before:
                self._session.prefill(self._prompt[:1])
            self._session.step(self._greedy)
            decode.append(_seconds(self._generate))
        return prefill[1:], first[1:], decode[1:]

    def _start(self) -> None:
        self._session.truncate(0)
        self._append(self._before)

    def _compute_prompt(self) -> None:
        self._append(self._prompt)

    def _append(self, ids: list[int]) -> None:
        for start in range(0, len(ids), self._chunk):
            self._session.prefill(ids[start : start + self._chunk])

    def _generate(self) -> None:
        num_left = self._gen
        while num_left > 0:
            num_left -= len(self._session.step(self._greedy))


def _describe(path: Path) -> tuple[str, int, int]:
    """Name as llama-bench would give it, parameters, and those of matrices each token meets."""
    from edgellm.cli.show import num_parameters
    from edgellm.format import EdgeFile
    from edgellm.types import TensorFormat

    with EdgeFile.open(path) as file:
        head = file.meta["quantization"]["head"]
        matrices = [
            tensor
            for tensor in file.tensors.values()
            if tensor.name.startswith("layers.") and tensor.format != TensorFormat.F32
        ]
        formats = "+".join(sorted({tensor.format.name for tensor in matrices}))
        name = f"{file.meta['model']['architecture']} {formats}, head {head}"
        return name, num_parameters(file), sum(one.rows * one.cols for one in matrices)


def _text(result: dict[str, Any]) -> str:
    at_depth = f" @ d{result['n_depth']}" if result["n_depth"] else ""
    same = (
        result["model"],
        f"{result['size_bytes'] / 2**20:.2f} MiB",
        f"{result['num_parameters'] / 1e6:.2f} M",
        f"{result['backend']} {result['isa']}",
    )
    cells = [
        (*same, str(result[f"{what}_threads"]), f"{test}{at_depth}", _speed(result, what))
        for what, test in (
            ("prefill", f"pp{result['n_prompt']}"),
            ("decode", f"tg{result['n_gen']}"),
        )
    ]
    head = ("model", "size", "params", "backend", "threads", "test", "t/s")
    lines = [
        table(head, cells, (1, 2, 4, 5, 6)),
        "",
        f"time to first token  {result['ttft_ms']:.1f} ms after {result['n_prompt']} tokens",
        f"peak memory          {format_bytes(result['peak_rss_bytes'])}",
        f"weights per token    {format_bytes(result['bytes_per_token'])}",
        f"decode reads         {result['decode_gb_s']:.1f} GB/s, {result['decode_share']:.0%} of"
        f" the {result['probe_gb_s']:.1f} GB/s of plain reading",
        f"prefill computes     {result['prefill_gop_s']:.0f} GOP/s in matrices,"
        f" {result['prefill_share']:.0%} of the {result['int8_peak_gop_s']:.0f} GOP/s of"
        f" {result['isa']}",
        *_baseline_text(result["baseline"]),
    ]
    return "\n".join(lines)


def _baseline_text(baseline: dict[str, Any] | None) -> list[str]:
    if baseline is None:
        return []
    if "stored" in baseline:
        return [f"later runs           are compared with this one, {baseline['stored']}"]
    lines = [
        f"compared with        the run of {baseline['date']}, edgellm {baseline['version']};"
        " --save-baseline replaces it"
    ]
    for what in ("prefill", "decode"):
        one = baseline[what]
        lines.append(
            f"  {what:<18} {one['ratio']:.2f} x, range {one['spread']:.0%} now,"
            f" {one['stored_spread']:.0%} then: {one['verdict']}"
        )
    return [*lines, f"  plain reading      {baseline['probe_ratio']:.2f} x"]


def _speed(result: dict[str, Any], what: str) -> str:
    return f"{result[f'{what}_tok_s']:.2f} ± {result[f'{what}_sd']:.2f}"


def _seconds(work: Callable[[], None]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
