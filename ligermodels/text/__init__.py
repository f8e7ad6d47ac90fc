"""Tokenizers, chat templates, and text that streams.

tokenizer    `Tokenizer`: calls, chats, decoding; vocabulary is its part of tokens and ids, batch that of padding
files        reads the files of a folder, except the vocabulary; saving writes them
backend      the vocabulary as a `tokenizers.Tokenizer`, which sentencepiece makes of SentencePiece's
             tokenizer.model, and tiktoken of tiktoken's tokenizer.model and tekken.json
chat         chat templates, which run in sandbox
stream       decodes token by token, and stops at stop strings
harmony      decodes answers in messages with channels, as gpt-oss gives them
"""

from ligermodels.text.stream import StopStrings as StopStrings, StreamDecoder as StreamDecoder
from ligermodels.text.tokenizer import Tokenizer as Tokenizer
