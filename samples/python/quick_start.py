"""Quick start: python quick_start.py MODEL.edge ["Why is the sky blue?"]."""

from __future__ import annotations

import sys

from edgellm import LLM, SamplingParams


def main() -> None:
    path = sys.argv[1]
    question = sys.argv[2] if len(sys.argv) > 2 else "Why is the sky blue?"
    with LLM(path) as llm:
        answer = llm.chat([{"role": "user", "content": question}], max_tokens=64)
        print(answer.text)
        print(f"{answer.stats.decode_tok_s:.1f} tok/s, ended by {answer.finish_reason}")

        # Plain text goes on without a chat template, here with a drawn instead of the best token.
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
        print(llm.generate("Once upon a time", sampling, max_tokens=32).text)


if __name__ == "__main__":
    main()
