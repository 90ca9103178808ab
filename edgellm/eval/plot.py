"""KL divergence against size, as a picture."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Sequence
from pathlib import Path

from edgellm.errors import EdgeLLMError, MissingExtraError
from edgellm.eval.results import Evaluation, ModelPath
from edgellm.format.temporary import create_temporary, remove_stale

__all__ = ["check_plot", "plot"]


def check_plot() -> None:
    """Raises MissingExtraError if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError('--plot draws with matplotlib: pip install "edgellm[eval]"')


def plot(evaluations: Sequence[Evaluation], path: ModelPath) -> None:
    """Draws models of one comparison; the bars are 95 % confidence intervals.

    Args:
        evaluations: With a divergence each.
        path: The PNG; it appears when it is whole.

    Raises:
        MissingExtraError: matplotlib is not installed.
        EdgeLLMError: The file cannot be written.
    """
    check_plot()
    from matplotlib.figure import Figure

    points = [(one, one.divergence.kl) for one in evaluations if one.divergence is not None]
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    sizes = [one.size_bytes / 1e6 for one, _ in points]
    middle = (min(sizes) + max(sizes)) / 2
    for size, (one, kl) in zip(sizes, points, strict=True):
        bars = [[kl.value - kl.low], [kl.high - kl.value]]
        axes.errorbar([size], [kl.value], yerr=bars, fmt="o", capsize=3)
        label = f"{one.model}, {one.bits_per_weight:.2f} bits"
        is_left = size > middle  # a label at the edge would leave the picture
        axes.annotate(
            label,
            (size, kl.value),
            xytext=(-6 if is_left else 6, 6),
            textcoords="offset points",
            ha="right" if is_left else "left",
        )
    text = evaluations[0].text
    axes.set_xlabel("size of the file, MB")
    axes.set_ylabel("KL divergence, nats a token")
    axes.set_title(f"{text.name}, {text.num_scored:,} tokens, 95 % intervals", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.25)
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    _write(Path(os.path.realpath(path)), picture.getvalue())


def _write(path: Path, data: bytes) -> None:
    try:
        remove_stale(path)
        descriptor, temporary = create_temporary(path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise EdgeLLMError(f"cannot write {path}: {error.strerror or error}") from error
