"""Text: tokenizer, chat templates, incremental detokenizer, stop strings."""

from __future__ import annotations

from edgellm.text.chat import ChatEncoder, EncodedChat
from edgellm.text.chat_template import ChatTemplate
from edgellm.text.detokenizer import Detokenizer
from edgellm.text.loading import load_text
from edgellm.text.stop import StopMatcher
from edgellm.text.tokenizer import Tokenizer

__all__ = [
    "ChatEncoder",
    "ChatTemplate",
    "Detokenizer",
    "EncodedChat",
    "StopMatcher",
    "Tokenizer",
    "load_text",
]
