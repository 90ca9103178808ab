"""A chat that shows its answers while they are made: python streaming_chat.py MODEL.edge."""

from __future__ import annotations

import sys

from edgellm import LLM, Message


def main() -> None:
    history: list[Message] = []
    with LLM(sys.argv[1]) as llm:
        for line in sys.stdin:
            history.append({"role": "user", "content": line.strip()})
            answer = ""
            # The session keeps its tokens: of a longer history only what is new is computed.
            for delta in llm.stream_chat(history, max_tokens=64):
                print(delta.text, end="", flush=True)
                answer += delta.text
                if delta.stats:
                    print(f"\n({delta.stats.cached_tokens} tokens were still in the cache)")
            history.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
