"""Checks real models against their oracles; `make models-check`.

    models_check.py [NAME...] [--tokens N] [--skip STAGE,...] [--reuse] [--data FOLDER]

For each model: hashes and test vectors (`edgellm verify`), token ids and rendered chats against
transformers, KL divergence of the logits, and equality of all bits across instruction sets, threads
and chunks. Prints a table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import pre_tokenizers

from edgellm._native import NativeModel, kernels
from edgellm.cli import _sources
from edgellm.engine import LLM
from edgellm.format import EdgeFile
from edgellm.models import find_hf
from edgellm.models._reference import ReferenceModel
from edgellm.models._spec import Rewrite
from edgellm.text import load_text

ROOT = Path(__file__).parents[2]
STAGES = ("verify", "tokens", "chats", "kl", "exact")
NUM_LINES = 2000
CHUNK = 1024  # tokens of one context in the KL stage; past Gemma's window of 512
FLOAT_BOUND = 0.0002  # nats a token: everything but int8 activations and the float16 cache
NATIVE_BOUND = 0.03
EXACT_TOKENS = 513
EMULATED_TOKENS = 9
CHUNKS = (1, 7, 64, 512)
ARM_BUILDS = ("native", "native-aarch64")
REF_TOKENS = 65  # the scalar kernels are slow

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table."""

    model: str
    check: str
    figure: str
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model under check: its exported file and the GGUF it was made of."""

    name: str
    edge: Path
    gguf: Path

    def result(self, check: str, figure: str, is_right: bool) -> Result:
        """A line of the table about this model."""
        return Result(model=self.name, check=check, figure=figure, is_right=is_right)


# ---- texts -------------------------------------------------------------------------------------


def prose_lines(data: Path) -> list[str]:
    """Mixed text: encyclopaedia, verse, many languages."""
    files = ("wikitext-2/test.txt", "tinyshakespeare/input.txt")
    languages = data / "calibration/exllamav3_multilingual.utf8"
    sources = [(data / name).read_text("utf-8").splitlines() for name in files]
    sources.append(languages.read_text("utf-8").splitlines())
    # <unk> is a control token of some models; transformers obeys it in plain text, we do not.
    sources = [[line.replace("<unk>", "word") for line in lines] for lines in sources]
    return _interleave([[line for line in lines if line.strip()] for lines in sources])


def code_lines(data: Path) -> list[str]:
    """Code: HumanEval, many languages, the standard library's own sources."""
    with gzip.open(data / "humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file]
    human_eval = [line for task in tasks for line in (task["prompt"] + task["test"]).splitlines()]
    many = (data / "calibration/exllamav3_code.utf8").read_text("utf-8").splitlines()
    return _interleave([human_eval, many, inspect.getsource(argparse).splitlines()])


def _interleave(sources: list[list[str]]) -> list[str]:
    """NUM_LINES lines, evenly spread over each source; a source that is short gives all it has."""
    lines: list[str] = []
    for left, source in zip(range(len(sources), 0, -1), sorted(sources, key=len), strict=True):
        share = (NUM_LINES - len(lines)) // left
        lines += source[:: max(1, len(source) // share)][:share]
    return lines


# transformers' GGUF converter splits every byte-level BPE as GPT-2 does and ignores the file's
# tokenizer.ggml.pre; these are of the models' own tokenizer.json.
PUBLISHED_PRE_TOKENIZERS = {
    "smollm2": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
}

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Why?\n"}],
    [
        {"role": "user", "content": "Nenne drei Städte. 你好 🙂"},
        {"role": "assistant", "content": "Köln, Bonn, Ulm."},
        {"role": "user", "content": "```python\nprint('{{ x }}')\n```"},
    ],
)


# ---- stages --------------------------------------------------------------------------------------


def check_verify(model: Model) -> Iterator[Result]:
    """Hashes and test vectors, through the command."""
    run = subprocess.run(
        [sys.executable, "-m", "edgellm", "verify", str(model.edge)], capture_output=True, text=True
    )
    last = (run.stdout + run.stderr).strip().splitlines()[-1:]
    yield model.result("edgellm verify", " ".join(last)[-60:], run.returncode == 0)


def check_tokens(model: Model, oracle: Any, data: Path) -> Iterator[Result]:
    """Token ids of lines of text and code equal transformers'."""
    with EdgeFile.open(model.edge) as file:
        tokenizer, _ = load_text(file)
    for kind, lines in (("text", prose_lines(data)), ("code", code_lines(data))):
        wrong = [
            line
            for line in lines
            if tokenizer.encode(line, add_bos=False)
            != oracle(line, add_special_tokens=False)["input_ids"]
        ]
        for line in wrong[:3]:
            print(f"  ids differ: {line!r}")
        yield model.result(
            f"ids, {kind}", f"{len(lines) - len(wrong)} of {len(lines)} lines equal", not wrong
        )


def check_chats(model: Model, oracle: Any) -> Iterator[Result]:
    """Rendered chats and their ids equal transformers'."""
    with EdgeFile.open(model.edge) as file:
        _, template = load_text(file)
    if template is None or oracle.chat_template is None:
        is_right = template is None and oracle.chat_template is None
        yield model.result("chats", "no template, as in the source", is_right)
        return
    equal = 0
    for messages in CHATS:
        ours = template.encode(messages)
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected_ids = oracle(expected, add_special_tokens=False)["input_ids"]
        equal += ours.text == expected and ours.ids == expected_ids
    yield model.result("chats", f"{equal} of {len(CHATS)} equal", equal == len(CHATS))


def check_kl(model: Model, data: Path, num_tokens: int) -> Iterator[Result]:
    """KL divergence from transformers in float32 that holds the file's dequantised weights."""
    reference = ReferenceModel.from_edge(model.edge)
    oracle = dequantized_oracle(model.gguf, reference)
    known = reference.description.num_tokens
    sums = {"float": 0.0, "native": 0.0}
    count = past_window = 0
    with LLM(model.edge, context=CHUNK) as llm:
        for ids in contexts(model.edge, data, num_tokens):
            with torch.inference_mode():
                expected = oracle(torch.tensor([ids])).logits[0].numpy()[:, :known]
            sums["float"] += kl_sum(expected, reference.forward(ids)[:, :known])
            sums["native"] += kl_sum(expected, llm.logits(ids)[:, :known])
            count += len(ids)
            past_window += max(0, len(ids) - 512)
            so_far = ", ".join(f"{name} {total / count:.3g}" for name, total in sums.items())
            print(f"  {model.name}: KL after {count} tokens: {so_far}", flush=True)
    suffix = f"nats/token, {count} tokens, {past_window} past 512"
    for name, bound in (("float", FLOAT_BOUND), ("native", NATIVE_BOUND)):
        mean = sums[name] / count
        yield model.result(f"KL, {name} (max {bound})", f"{mean:.3g} {suffix}", mean <= bound)


def check_exact(model: Model, data: Path) -> Iterator[Result]:
    """All bits of the logits are the same, whichever kernels, threads and chunks made them."""
    ids = next(contexts(model.edge, data, CHUNK))[:EXACT_TOKENS]
    isas = list(dict.fromkeys(row.isa for row in kernels() if row.is_supported))
    short, whole, count = set(), set(), 0
    for isa in isas:
        ways = [(threads, chunk) for threads in (1, 2) for chunk in CHUNKS]
        if isa == "ref":
            ways = ways[::2]
        for threads, chunk in ways:
            piece = ids[:REF_TOKENS] if isa == "ref" else ids
            first, last = digests(model.edge, piece, isa, threads, chunk)
            short.add(first)
            count += 1
            if isa != "ref":
                whole.add(last)
    figure = f"{count} runs: {', '.join(isas)}; 1, 2 threads; chunks {CHUNKS}"
    yield model.result("bits equal", figure, len(short) == 1 and len(whole) <= 1)
    yield check_emulated(model, ids[:EMULATED_TOKENS])


def check_emulated(model: Model, ids: list[int]) -> Result:
    """AArch64 kernels under qemu give the bits of this machine."""
    check = "bits equal, AArch64 (qemu)"
    native, emulated = (ROOT / "build" / name / "logits_digest" for name in ARM_BUILDS)
    if not (native.exists() and emulated.exists()):
        return model.result(check, "SKIPPED: run make test-c test-aarch64 first", True)
    arguments = [str(model.edge), ",".join(map(str, ids))]
    qemu = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", str(emulated)]
    isas = ["neon_i8mm", "neon_dotprod", "neon"]
    commands = [[str(native), *arguments], *([*qemu, *arguments, isa] for isa in isas)]
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for command in commands
    ]
    return model.result(check, f"{len(ids)} tokens: {', '.join(isas)}", len(set(outputs)) == 1)


def digests(path: Path, ids: list[int], isa: str, threads: int, chunk: int) -> tuple[str, str]:
    """SHA-256 of the logits of the first REF_TOKENS positions, and of all."""
    short, whole = hashlib.sha256(), hashlib.sha256()
    with NativeModel(path, threads=threads, isa=isa) as native:
        session = native.create_session(context=len(ids), chunk=chunk)
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            rows = session.prefill(piece, num_logits=len(piece))
            short.update(rows[: max(0, REF_TOKENS - start)].tobytes())
            whole.update(rows.tobytes())
        session.close()
    return short.hexdigest(), whole.hexdigest()


# ---- oracles -------------------------------------------------------------------------------------


def tokenizer_oracle(model: Model) -> Any:
    """The transformers tokenizer of the GGUF file, with the model's published pre-tokenizer."""
    oracle = transformers.AutoTokenizer.from_pretrained(
        model.gguf.parent, gguf_file=model.gguf.name
    )
    if model.name in PUBLISHED_PRE_TOKENIZERS:
        oracle.backend_tokenizer.pre_tokenizer = PUBLISHED_PRE_TOKENIZERS[model.name]
    return oracle


def dequantized_oracle(gguf: Path, reference: ReferenceModel) -> Any:
    """The transformers model of a GGUF file with the weights of the reference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    spec = find_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})
    left = dict(model.named_parameters())
    for tensor in spec.sources("hf", reference.description):
        values = reference._get(tensor.canonical_name)
        if tensor.rewrite is Rewrite.ADD_ONE:
            values = values - np.float32(1)
        with torch.no_grad():
            left.pop(tensor.source_name).copy_(torch.tensor(values))
    if left:
        sys.exit(f"{gguf.name}: transformers has parameters that the file lacks: {sorted(left)}")
    return model


def contexts(edge: Path, data: Path, num_tokens: int) -> Iterator[list[int]]:
    """Contexts of at most CHUNK tokens of wikitext-2, each with the BOS token the model wants."""
    with EdgeFile.open(edge) as file:
        tokenizer, _ = load_text(file)
        meta = file.meta["tokenizer"]
    begin = [meta["bos_id"]] if meta["add_bos"] else []
    text = (data / "wikitext-2/test.txt").read_text("utf-8")[: 16 * num_tokens]
    ids = iter(tokenizer.encode(text, add_bos=False)[:num_tokens])
    while piece := list(islice(ids, CHUNK - len(begin))):
        yield begin + piece


def kl_sum(expected: Floats, got: Floats) -> float:
    """Sum over rows of the KL divergence between two (n, vocab) arrays of logits, nats."""
    total = 0.0
    for start in range(0, len(expected), 64):
        p, q = (_log_softmax(rows[start : start + 64]) for rows in (expected, got))
        total += float(np.sum(np.exp(p) * (p - q)))
    return total


def _log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


# ---- the run ---------------------------------------------------------------------------------


def fetch(name: str, reuse: bool) -> Model:
    """Downloads the model once, below build/, and exports it anew unless told to reuse."""
    store = ROOT / "build/models-check"
    edge = store / "edgellm/models" / f"{name}.edge"
    gguf = edge.with_suffix(".gguf")
    if reuse and edge.exists() and gguf.exists():
        return Model(name=name, edge=edge, gguf=gguf)
    if gguf.exists():
        command = ["export", str(gguf), "-o", str(edge)]
    else:
        edge.unlink(missing_ok=True)
        command = ["pull", name, "--keep-source"]
    environment = {**os.environ, "XDG_DATA_HOME": str(store)}
    result = subprocess.run([sys.executable, "-m", "edgellm", *command], env=environment)
    if result.returncode != 0:
        sys.exit(f"models_check: edgellm {' '.join(command)} failed")
    return Model(name=name, edge=edge, gguf=gguf)


def check(model: Model, stages: list[str], data: Path, num_tokens: int) -> Iterator[Result]:
    """All stages of one model."""
    oracle = None
    if {"tokens", "chats"} & set(stages):
        oracle = tokenizer_oracle(model)
    actions: dict[str, Callable[[], Iterator[Result]]] = {
        "verify": lambda: check_verify(model),
        "tokens": lambda: check_tokens(model, oracle, data),
        "chats": lambda: check_chats(model, oracle),
        "kl": lambda: check_kl(model, data, num_tokens),
        "exact": lambda: check_exact(model, data),
    }
    for stage in stages:
        yield from actions[stage]()


def main() -> None:
    """Reads the command line, checks, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="of pulled models")
    parser.add_argument("--tokens", type=int, default=4096, help="of wikitext-2 in the KL stage")
    parser.add_argument("--skip", default="", help=f"stages of {', '.join(STAGES)}")
    parser.add_argument("--reuse", action="store_true", help="the files exported before")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    arguments = parser.parse_args()
    if not (arguments.data / "wikitext-2/test.txt").exists():
        parser.error(f"{arguments.data} has no wikitext-2/test.txt; give the folder with --data")
    transformers.utils.logging.set_verbosity_error()
    stages = [stage for stage in STAGES if stage not in arguments.skip.split(",")]
    results: list[Result] = []
    for name in arguments.names or list(_sources.SOURCES):
        for result in check(fetch(name, arguments.reuse), stages, arguments.data, arguments.tokens):
            results.append(result)
            print(line(result), flush=True)
    print("\n" + "\n".join(line(result) for result in results))
    sys.exit(0 if all(result.is_right for result in results) else 1)


def line(result: Result) -> str:
    """One line of the table."""
    mark = "ok  " if result.is_right else "FAIL"
    return f"{mark} {result.model:14} {result.check:26} {result.figure}"


if __name__ == "__main__":
    main()
