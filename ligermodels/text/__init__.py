"""Tokenizers, chat templates, and text that streams."""

from ligermodels.text.stream import StopStrings, StreamDecoder
from ligermodels.text.tokenizer import Tokenizer

__all__ = ["StopStrings", "StreamDecoder", "Tokenizer"]
