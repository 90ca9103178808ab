"""What each step of a calibrated export gives; `make ablation ARGS=FOLDER`.

    ablation.py FOLDER [--text FILE] [--windows N] [--only NAME]... [--threads N]

Exports the model of a Hugging Face folder with one step after another, and measures each file's KL
divergence from the float model on the text (default: what is held out of edgellm's own). Prints a
Markdown table. `change` is against the variant named in the column before it, over the same tokens,
so that it is known better than the two figures themselves. Errors are standard errors over runs of
64 tokens. `seconds` are those of the export, without the passes that variants share: the model's
own text and the float model's pass. These lie in build/ablation and are used again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from edgellm.exporters import quality
from edgellm.exporters.calibrated import Calibrator
from edgellm.exporters.calibration import digest, encode_windows, read_text
from edgellm.exporters.equalize import ALPHAS, Alphas
from edgellm.exporters.error_feedback import Feedback
from edgellm.exporters.export import DEFAULT_BITS, ExportOptions, ExportPlan, plan_export, run_plan
from edgellm.exporters.quality import QUALITIES, Quality
from edgellm.exporters.workers import workers
from edgellm.exporters.workspace import Workspace
from edgellm.types import Float32Array, Int32Array

BUILD: Final = Path(__file__).parents[2] / "build/ablation"
SHARED: Final = ("windows", "float")
OWN_TEXT: Final = Path(quality.__file__).with_name("calibration.txt")
BALANCED: Final = QUALITIES["balanced"]
FIT: Final = Feedback(is_asymmetric=False, is_spread=False, sweeps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to export.

    Attributes:
        name: What is new in it.
        base: The variant it is compared with.
        steps: Those of calibration; None: there are none.
        bits: As for `edgellm export`; None: E4 for layers, E8 for embedding and head.
        text: As for `edgellm export --calibration`.
    """

    name: str
    base: str
    steps: Quality | None
    bits: float | None = None
    text: Path | None = None


def _variants() -> Iterator[Variant]:
    yield Variant(name="fast", base="", steps=None)
    previous = "fast"
    for name, alphas, feedback in (
        ("fit weighted by the inputs", Alphas(), FIT),
        ("layers equalised", replace(ALPHAS, head=0.0), FIT),
        ("head equalised", ALPHAS, FIT),
        ("error feedback", ALPHAS, replace(FIT, is_spread=True)),
        ("coordinate descent, refit of D", ALPHAS, Feedback(is_asymmetric=False)),
        ("asymmetric target", ALPHAS, Feedback()),
    ):
        steps = replace(BALANCED, has_hadamard=False, alphas=alphas, feedback=feedback)
        yield Variant(name=name, base=previous, steps=steps)
        previous = name
    name = "inputs transformed, not equalised"
    yield Variant(name=name, base=previous, steps=BALANCED)
    previous = name
    for bits in (5.4, DEFAULT_BITS, 6.0):
        name = f"{bits} bits, where they save most"
        yield Variant(name=name, base=previous, steps=BALANCED, bits=bits)
    for damping in (0.1, 1.0):
        steps = replace(BALANCED, feedback=Feedback(damping=damping))
        yield Variant(name=f"damping {damping}", base=previous, steps=steps)
    for alpha in (0.5, 0.7):
        steps = replace(BALANCED, has_hadamard=False, alphas=replace(ALPHAS, head=alpha))
        yield Variant(name=f"alpha of the head {alpha}", base=previous, steps=steps)
    yield Variant(name="our text alone", base=previous, steps=BALANCED, text=OWN_TEXT)
    yield Variant(name="as thorough as best", base=previous, steps=QUALITIES["best"])


VARIANTS: Final = tuple(_variants())


class VariantWorkspace(Workspace):
    """A variant's workspace, whose windows and float pass lie in one that others use too."""

    shared: ClassVar[Workspace | None] = None

    def load(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """What was kept under a name, by whichever variant."""
        is_shared = self.shared is not None and name in SHARED
        return self.shared.load(name) if is_shared else super().load(name)


def share(
    plan: ExportPlan, variant: Variant, held_out: Int32Array | None, threads: int
) -> dict[str, npt.NDArray[Any]]:
    """Chooses windows and runs the float model over them, unless that has been done.

    Args:
        plan: The model.
        variant: Which windows it wants.
        held_out: (m, length) int32: windows to measure on; None: those held out of our text.
        threads: Threads to use.

    Returns:
        "windows" and "held_out", token ids, and for these "hidden", what the head multiplies.
    """
    steps = variant.steps or BALANCED
    name = f"{steps.windows}-{variant.text.stem if variant.text else 'own'}"
    task = [name, "" if held_out is None else digest(held_out)]
    if VariantWorkspace.shared is not None:
        VariantWorkspace.shared.close()
    workspace = Workspace(BUILD / name, quality._fingerprint(plan.source, plan.tensors, task))
    VariantWorkspace.shared = workspace
    if workspace.load("float") is None:
        started = perf_counter()
        calibration = quality._gather(
            plan.source,
            plan.tokenizer,
            read_text(variant.text),
            variant.text,
            steps.windows,
            workspace,
            threads,
            lambda path: run_plan(plan, path, ExportOptions(threads=threads)),
        )
        if held_out is not None:
            calibration = replace(calibration, held_out=held_out)
            workspace.save("windows", windows=calibration.windows, held_out=held_out)
        with workers(threads) as pool:
            Calibrator(
                plan.source,
                plan.tensors,
                calibration,
                workspace,
                alphas=steps.alphas,
                feedback=steps.feedback,
                pool=pool,
                advance=lambda: None,
            ).collect()
        print(f"{name}: text and float pass took {perf_counter() - started:.0f} s", flush=True)
    windows, passed = (workspace.load(name) for name in SHARED)
    assert windows is not None
    assert passed is not None
    return windows | {"hidden": passed["hidden"]}


def measure(
    plan: ExportPlan, variant: Variant, held_out: Int32Array | None, threads: int
) -> tuple[npt.NDArray[np.float64], float, float]:
    """Exports a variant.

    Returns:
        KL divergence of each run of 64 tokens in nats a token, bits a weight, seconds.
    """
    shared = share(plan, variant, held_out, threads)
    output = BUILD / "variant.edge"
    started = perf_counter()
    options = ExportOptions(threads=threads)
    if variant.steps is not None:
        QUALITIES["balanced"] = variant.steps
        head = "auto" if variant.bits else "q8"
        options = ExportOptions(
            threads=threads,
            quality="balanced",
            head=head,
            bits=variant.bits,
            calibration=variant.text,
        )
    report = run_plan(plan, output, options)
    seconds = perf_counter() - started
    hidden: Float32Array = shared["hidden"]
    sums = quality.compare(plan.source, shared["held_out"], hidden, output, threads)
    bits = 8 * report.plan.weight_bytes / report.plan.num_weights
    output.unlink()
    return sums[:, 0] * len(sums) / shared["held_out"].size, bits, seconds


def _with_error(values: npt.NDArray[np.float64], sign: str = "") -> str:
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():{sign}.4f} ± {error:.4f}"


def main() -> None:
    """Reads the command line, measures, prints a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a model of Hugging Face, not quantised")
    parser.add_argument("--text", type=Path, help="to measure on")
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens of that text")
    parser.add_argument("--only", action="append", choices=[item.name for item in VARIANTS])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    quality.Workspace = VariantWorkspace  # type: ignore[misc]
    plan = plan_export(arguments.folder)
    held_out = None
    if arguments.text is not None:
        tokenizer = plan.source.tokenizer
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        length = min(512, plan.source.description.max_context)
        held_out = encode_windows(plan.tokenizer, read_text(arguments.text), bos, length)
        held_out = held_out[: arguments.windows]
    measured: dict[str, npt.NDArray[np.float64]] = {}
    print("| variant | KL divergence | change | against | bits | seconds |")
    print("|---|--:|--:|---|--:|--:|", flush=True)
    for item in VARIANTS:
        if arguments.only and item.name not in arguments.only:
            continue
        found, bits, seconds = measure(plan, item, held_out, arguments.threads)
        measured[item.name] = found
        change = ""
        if item.base in measured:
            change = _with_error(found - measured[item.base], "+")
        print(
            f"| {item.name} | {_with_error(found)} | {change} | {item.base} | {bits:.2f} "
            f"| {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
