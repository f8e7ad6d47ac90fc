"""Tokenizers, chat templates, and text that streams."""

from ligermodels.text.stream import StopStrings as StopStrings, StreamDecoder as StreamDecoder
from ligermodels.text.tokenizer import Tokenizer as Tokenizer
