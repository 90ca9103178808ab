"""Quality of quantised files of one model, ours and llama.cpp's, as a Markdown table.

    quality_table.py REFERENCE FILE... --text FILE [--text FILE] [--tokens N] [--context N]
                     [--engine NAME] [--json FILE]

REFERENCE is the float32 Hugging Face folder that all files were made of, or a file that
`edgellm eval --save-reference` wrote. A FILE ends in .edge or .gguf. A text is UTF-8, or
HumanEval.jsonl.gz, of which prompts and solutions are taken. All score the same tokens: those of
the first FILE's tokenizer, in windows, each token but the first of a window (`edgellm.eval`). Name
a GGUF file first: a folder that transformers saved may have forgotten how a text begins.

An .edge file runs on the engine, with its int8 activations and cache. A GGUF file is dequantised
and runs in float32, which flatters it: llama.cpp rounds activations too. That takes torch and
transformers (the dev extra) and 4 bytes of memory a weight, for all files at once; without them,
or with --engine numpy, our own forward pass does it, slowly.

`bits` are those of all tensors, embedding and norms too, by the model's weights; MB are the whole
file's. KL is KL(reference || file) in nats a token. After ±: half of the 95 % interval.

llama.cpp's files, with its own tools:

    convert_hf_to_gguf.py FOLDER --outtype f32 --outfile float.gguf
    llama-imatrix -m float.gguf -f CALIBRATION -c 512 -o imatrix.gguf
    llama-quantize --imatrix imatrix.gguf float.gguf NAME.gguf Q4_K_M
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from edgellm.errors import EdgeLLMError
from edgellm.eval import Comparison, Estimate, EvalOptions, Evaluation, compare
from edgellm.exporters.gguf import GGUFFile
from edgellm.format import EdgeFile

HEAD = ("text", "file", "bits", "MB", "KL", "perplexity", "same top, %")


def main() -> None:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--engine", choices=("auto", "transformers", "numpy"), default="auto")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    options = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of transformers
    with tempfile.TemporaryDirectory() as folder:
        try:
            comparisons = [
                compare(
                    options.files,
                    options.reference,
                    EvalOptions(
                        text=plain_text(text, Path(folder)),
                        tokens=options.tokens,
                        context=options.context,
                        reference_engine=options.engine,
                    ),
                    progress,
                )
                for text in options.text
            ]
        except (EdgeLLMError, ValueError) as error:
            sys.exit(f"error: {error}")
    if options.json is not None:
        whole = [dataclasses.asdict(comparison) for comparison in comparisons]
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(comparisons)))


def plain_text(path: Path, folder: Path) -> Path:
    """The text itself, or that of HumanEval's problems in a file in `folder`."""
    if path.suffix != ".gz":
        return path
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    text = folder / f"{path.name.partition('.')[0]}.py"
    code = (problem["prompt"] + problem["canonical_solution"] for problem in problems)
    text.write_text("\n".join(code), encoding="utf-8")
    return text


def progress(done: int, total: int) -> None:
    """Counts tokens on a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)


def markdown(comparisons: Iterable[Comparison]) -> list[str]:
    """Lines of the table, in which each text begins with its reference, and what was scored."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * 2}{' ---: |' * (len(HEAD) - 2)}"]
    notes = [""]
    for comparison in comparisons:
        first = comparison.evaluations[0]
        assert first.divergence is not None
        name, expected = first.text.name, first.divergence
        start = (
            "the text's own" if first.text.bos_id is None else f"replaced by {first.text.bos_id}"
        )
        notes.append(
            f"{name}: {first.text.num_scored:,} tokens in windows of {first.text.context}, the"
            f" first of a window {start}."
        )
        perplexity = half(expected.perplexity, 2)
        lines.append(f"| {name} | {expected.reference} | | | | {perplexity} | |")
        lines += [f"| {name} | {' | '.join(row(one))} |" for one in comparison.evaluations]
    return lines + notes


def row(one: Evaluation) -> tuple[str, ...]:
    """A file's cells."""
    assert one.divergence is not None
    path = Path(one.path)
    num_weights = 8 * one.size_bytes / one.bits_per_weight
    return (
        path.name,
        f"{8 * tensor_bytes(path) / num_weights:.3f}",
        f"{one.size_bytes / 1e6:.1f}",
        half(one.divergence.kl, 4),
        half(one.perplexity, 2),
        half(one.divergence.top1.map(lambda share: 100 * share), 1),
    )


def tensor_bytes(path: Path) -> int:
    """Bytes of a file's tensors, without metadata and the tokenizer."""
    if path.suffix == ".gguf":
        return sum(tensor.size for tensor in GGUFFile(path).tensors.values())
    with EdgeFile.open(path) as file:
        return sum(tensor.size for tensor in file.tensors.values())


def half(estimate: Estimate, digits: int) -> str:
    """A figure and half of its interval."""
    return f"{estimate.value:.{digits}f} ± {(estimate.high - estimate.low) / 2:.{digits}f}"


if __name__ == "__main__":
    main()
