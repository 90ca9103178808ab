"""The text side of a model from its `.edge` file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from edgellm.format.spec import SectionType
from edgellm.text.chat import ChatEncoder
from edgellm.text.chat_template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.format.reader import EdgeFile

__all__ = ["load_text"]


def load_text(
    edge_file: EdgeFile, *, clock: Callable[[], datetime] = datetime.now
) -> tuple[Tokenizer, ChatEncoder | None]:
    """Tokenizer and chat encoder of a model.

    Args:
        edge_file: An open file.
        clock: What templates get as the time.

    Returns:
        The tokenizer, and the chat encoder or None if the model has no chat template.

    Raises:
        FormatError: The tokenizer does not load.
        UnsupportedModelError: Its decoder is of a kind that cannot be streamed.
    """
    meta = edge_file.meta["tokenizer"]
    tokenizer = Tokenizer(
        edge_file.section_bytes(SectionType.TOKENIZER),
        add_bos=meta["add_bos"],
        bos_id=meta["bos_id"],
        eos_ids=meta["eos_ids"],
        special_tokens=meta["special_tokens"],
    )
    templates = {
        name: ChatTemplate(source, special_tokens=tokenizer.special_tokens, name=name, clock=clock)
        for name, source in edge_file.chat_templates.items()
    }
    return tokenizer, ChatEncoder(tokenizer, templates) if templates else None
