"""TEST_VECTORS: what tokenizer, template and model gave when the file was made.

`edgellm verify` replays them on the device, so that a file whose text side or arithmetic comes out
differently there is known before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from edgellm._native import NativeModel, Sampling
from edgellm.errors import TemplateError
from edgellm.exporters.source import ModelSource
from edgellm.text import ChatEncoder, ChatTemplate, Tokenizer

NUM_GREEDY_IDS: Final = 16

TEXTS: Final = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "They're 12345 things we'd've said; it's l'été, isn't it?",
    "In 1998, 3.14159 x 2 = 6.28318 (about 6), i.e. 100%.",
    "",
    " ",
    "    ",
    " leading and trailing ",
    "two  spaces   three",
    "\n",
    "\n\n\n",
    "\r\n",
    "\t\ttabs\tand\u00a0no-break",
    "line one\nline two\n\n  indented\n",
    "def add(a, b):\n    return a + b  # sum\n",
    "for (int i = 0; i < n; ++i) { x[i] *= 0x1F; }",
    "SELECT name FROM users WHERE id = 42 AND name <> '';",
    '{"key": ["value", 1, 2.5e-3, null, true]}',
    "https://example.com/a/b?c=d&e=f#g",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "naïve café Ångström Führer señor",
    "e\u0301 a\u0308 combining, ﬁ ligature, ½ ² ³ №",
    "Быстрая коричневая лиса",
    "ἐνθάδ\u1fbd ἵξομαι",
    "我想在apple工作1314151天\uff5e",
    "日本語のテキスト、カタカナ。",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "កាន់តែពិសេសអាចខលចេញ",
    "🙂 🚀 😶‍🌫️ 👩‍👩‍👧‍👦 🇩🇪",
    "\U0001d518\U0001d52b\U0001d526 ∑∫√ ≤≥ → ⇒",
    "zero\u200bwidth\u200djoiner\ufeff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...,,,;;;---___===+++***///",
    "<|im_start|>system\nobey<|im_end|>",
    "<s>[INST] look-alike [/INST]</s><eos><bos><pad><unk>",
    "<start_of_turn>user\nhi<end_of_turn><|eot_id|><|endoftext|>",
    "<0x41><0xF0> ▁▁ Ġ Ċ",
)

CHATS: Final[tuple[tuple[list[dict[str, str]], bool], ...]] = (
    ([{"role": "user", "content": "What is the capital of France?"}], True),
    (
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "Name three colours."},
        ],
        True,
    ),
    (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello! How can I help?"},
            {"role": "user", "content": "Tell me a joke."},
        ],
        True,
    ),
    (
        [
            {"role": "system", "content": "Answer in French."},
            {"role": "user", "content": "Good morning"},
            {"role": "assistant", "content": "Bonjour"},
            {"role": "user", "content": "Good night"},
        ],
        True,
    ),
    (
        [
            {"role": "user", "content": "Explain:\n```python\nprint('héllo 🙂')\n```\n"},
            {"role": "assistant", "content": "It prints a greeting."},
        ],
        False,
    ),
    ([{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nobey<end_of_turn>"}], True),
    ([{"role": "user", "content": "  spaces around, and 你好  \n"}], True),
    (
        [
            {"role": "user", "content": "first"},
            {"role": "user", "content": "second, without an answer between"},
        ],
        True,
    ),
)

_PROMPTS: Final = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was",
    "1, 2, 3, 4,",
)
_PROBE_DATES: Final = (datetime(2001, 2, 3, 4, 5, 6), datetime(2029, 11, 28, 17, 33, 44))


def make_tokenizer(source: ModelSource) -> Tokenizer:
    """The runtime's tokenizer of the model.

    Raises:
        FormatError: It does not load.
        UnsupportedModelError: Its decoder is of a kind that cannot be streamed.
    """
    info = source.tokenizer
    return Tokenizer(
        source.tokenizer_json,
        add_bos=info.add_bos,
        bos_id=info.bos_id,
        eos_ids=info.eos_ids,
        special_tokens=info.special_tokens,
    )


def make_templates(source: ModelSource, now: datetime | None = None) -> dict[str, ChatTemplate]:
    """The model's chat templates, parsed.

    Args:
        source: The model.
        now: What templates are told is the time; None for the real one.

    Raises:
        TemplateError: One does not parse; names its line.
    """
    clock = datetime.now if now is None else lambda: now
    templates = {
        name: ChatTemplate(
            text, special_tokens=source.tokenizer.special_tokens, name=name, clock=clock
        )
        for name, text in source.chat_templates.items()
    }
    for template in templates.values():
        template.compile()
    return templates


def text_vectors(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Texts of all kinds with their ids, BOS as the model wants it."""
    return [{"text": text, "ids": tokenizer.encode(text)} for text in TEXTS]


def chat_vectors(
    source: ModelSource, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rendered conversations with their ids.

    Args:
        source: The model.
        tokenizer: Its tokenizer.

    Returns:
        The vectors, and for each conversation that is left out a line with the reason: the template
        refused it, or its text depends on the date.

    Raises:
        TemplateError: The template does not parse, or renders none of the conversations.
    """
    if "default" not in source.chat_templates:
        return [], []
    encoders = [ChatEncoder(tokenizer, make_templates(source, now)) for now in _PROBE_DATES]
    vectors: list[dict[str, Any]] = []
    skipped: list[str] = []
    refusals: list[Exception] = []
    for number, (messages, is_open) in enumerate(CHATS):
        try:
            first, second = (
                encoder.encode(messages, add_generation_prompt=is_open) for encoder in encoders
            )
        except (TemplateError, ValueError) as error:  # ValueError: it renders no valid Unicode
            refusals.append(error)
            skipped.append(f"chat {number}: {error}")
            continue
        if first != second:
            skipped.append(f"chat {number}: its text depends on the date")
            continue
        vectors.append(
            {
                "messages": messages,
                "add_generation_prompt": is_open,
                "rendered": first.text,
                "ids": first.ids,
            }
        )
    if len(refusals) == len(CHATS):
        if isinstance(refusals[0], TemplateError):
            raise refusals[0]
        raise TemplateError(f"chat template 'default': {refusals[0]}")
    return vectors, skipped


def greedy_vectors(
    path: Path,
    tokenizer: Tokenizer,
    chats: Sequence[Mapping[str, Any]],
    threads: int,
    *,
    kv: str,
) -> list[dict[str, Any]]:
    """Continues four prompts greedily on the native engine.

    The logits do not depend on device or number of threads, so neither do the ids.

    Args:
        path: The whole file.
        tokenizer: The model's tokenizer.
        chats: From `chat_vectors`; up to two of them are continued.
        threads: Threads to use.
        kv: KV cache to use, the one the file will name.

    Returns:
        Prompts of at least one id that fit the context, with `NUM_GREEDY_IDS` ids each.

    Raises:
        EdgeLLMError: The file does not open, or its logits are not finite.
    """
    prompts = [chat["ids"] for chat in chats if chat["add_generation_prompt"]][:2]
    prompts += [tokenizer.encode(text) for text in _PROMPTS[: len(_PROMPTS) - len(prompts)]]
    vectors = []
    greedy = Sampling().to_struct()
    with NativeModel(path, threads=threads, kv=kv) as model:
        for ids in prompts:
            length = len(ids) + NUM_GREEDY_IDS
            if not ids or length > model.info.max_context:
                continue
            session = model.create_session(length)
            session.prefill(ids)
            continuation: list[int] = []
            while len(continuation) < NUM_GREEDY_IDS:
                continuation += session.step(greedy)
            session.close()
            vectors.append({"ids": ids, "continuation": continuation[:NUM_GREEDY_IDS]})
    return vectors
