"""Which KV cache a model gets by default: int8 where that costs next to nothing.

The finished file is run twice over a text of ours, once with each cache, and the KL divergence of
the logits decides. That is an upper bound: where activations are int8 too, any small change moves
some of their roundings. `edgellm show` says which cache and why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from edgellm._native import NativeModel
from edgellm.text import Tokenizer
from edgellm.types import Float32Array

# Mean nats a token that the int8 cache may cost.
MAX_KL: Final = 0.002
_MAX_TOKENS: Final = 1024
_ROWS: Final = 64  # of logits in memory at a time

_TEXT: Final = """\
The harbour was quiet when the ferry came in. Two gulls stood on the rail and watched the ropes
fly to the pier, where an old man in a yellow coat caught them without looking up. He had done this
for thirty years, in rain, in fog, in the white light of August, and he knew the boat by the sound
of its engine. "You are late," he said. The captain shrugged. Behind him the passengers pressed
forward with their bicycles and their boxes of tomatoes.

Water boils at 100 degrees Celsius at sea level, but at 3,000 metres it boils at about 90, because
the air above it weighs less. That is why beans take longer to cook in the mountains. A pressure
cooker does the opposite: it keeps the steam in, the pressure doubles, and the water reaches 120
degrees before it boils.

def moving_average(values, width):
    if width < 1:
        raise ValueError("width must be at least 1")
    total, out = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        out.append(total / min(i + 1, width))
    return out

Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?
Answer: From 9:40 to 13:00 it is three hours and twenty minutes, and five more minutes make three
hours and twenty-five minutes.

In 1854 a doctor in London marked every death from cholera on a map of Soho. The dots lay thickest
around one pump in Broad Street. He had its handle taken off, and within days there were fewer dots.
Nobody had seen a germ yet; the map was enough.

int count_words(const char *text) {
  int count = 0, inside = 0;
  for (; *text; ++text) {
    if (*text == ' ' || *text == '\\n') inside = 0;
    else if (!inside) { inside = 1; ++count; }
  }
  return count;
}

Liebe Anna, vielen Dank für deinen Brief. Hier regnet es seit Tagen, aber der Garten freut sich. Am
Sonntag kommen die Kinder, dann backen wir Apfelkuchen nach deinem Rezept. Et toi, comment vas-tu ?

SELECT city, COUNT(*) AS visits, AVG(duration) FROM trips WHERE year >= 2019 GROUP BY city ORDER BY
visits DESC LIMIT 10;

To repair a dripping tap, first turn off the water under the sink and open the tap until nothing
comes out. Take off the handle, unscrew the nut below it with a spanner, and pull out the stem. At
its end sits a small rubber washer; it is nearly always the washer. Put in a new one of the same
size, put everything back in the reverse order, and turn the water on slowly.
"""


def measure_int8(path: Path, tokenizer: Tokenizer, threads: int) -> dict[str, Any]:
    """KL divergence of the logits with an int8 cache from those with a float16 cache.

    Args:
        path: A whole file.
        tokenizer: The model's.
        threads: Threads to use.

    Returns:
        What META's "kv" holds: "int8_kl", mean nats a token, and the number of "tokens".

    Raises:
        EdgeLLMError: The file does not open, or memory is short.
    """
    with (
        NativeModel(path, threads=threads, kv="f16") as plain,
        NativeModel(path, threads=threads, kv="int8") as small,
    ):
        ids = tokenizer.encode(_TEXT)[: min(_MAX_TOKENS, plain.info.max_context)]
        known = plain.info.num_tokens  # the rest are padding, -inf in both
        sessions = [model.create_session(len(ids)) for model in (plain, small)]
        total = 0.0
        for start in range(0, len(ids), _ROWS):
            rows = ids[start : start + _ROWS]
            expected, found = (session.prefill(rows, len(rows)) for session in sessions)
            total += kl_sum(expected[:, :known], found[:, :known])
    return {"int8_kl": round(total / len(ids), 5), "tokens": len(ids)}


def choose_kv(model: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """META's "model" and "kv" for what was measured."""
    is_cheap = measured["int8_kl"] <= MAX_KL
    return {"model": model | {"kv_format": "int8" if is_cheap else "f16"}, "kv": measured}


def kl_sum(expected: Float32Array, found: Float32Array) -> float:
    """Sum over rows of KL(softmax(expected) || softmax(found)), nats."""
    p, q = log_softmax(expected), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum())


def log_softmax(logits: Float32Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logarithms of the softmax of each row, (rows, vocab) float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
