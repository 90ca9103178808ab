"""What would come next? python logits.py MODEL.edge ["The capital of France is"]."""

from __future__ import annotations

import sys

import numpy as np

from edgellm import LLM


def main() -> None:
    text = sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"
    with LLM(sys.argv[1], context=256) as llm:
        ids = llm.tokenize(text)
        logits = llm.logits(ids)  # (len(ids), vocab) float32
        last = logits[-1].astype(np.float64)
        probabilities = np.exp(last - last.max())
        probabilities /= probabilities.sum()
        for token in np.argsort(-probabilities)[:5]:
            print(f"{probabilities[token]:7.2%}  {llm.detokenize([int(token)])!r}")


if __name__ == "__main__":
    main()
