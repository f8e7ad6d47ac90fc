"""transformers' readers of tokenizer.model without protobuf, which they ask for."""

import importlib
from types import SimpleNamespace

import sentencepiece
from transformers import tokenization_utils_sentencepiece

from ligermodels.checkpoint.gguf.vocabulary import sentencepiece_pieces


class _Proto:
    """sentencepiece_model_pb2.ModelProto, as far as they read it."""

    def ParseFromString(self, data):
        pieces = sentencepiece_pieces(data)
        unk = sentencepiece.SentencePieceProcessor(model_proto=data).unk_id()
        self.pieces = [SimpleNamespace(piece=p.text, score=p.score, type=p.type) for _, p in sorted(pieces.items())]
        self.trainer_spec = SimpleNamespace(unk_id=unk, model_type=2)
        self.normalizer_spec = SimpleNamespace(precompiled_charsmap=b"")

    @classmethod
    def FromString(cls, data):
        found = cls()
        found.data, found.normalizer_spec = data, SimpleNamespace(add_dummy_prefix=True)
        return found

    def SerializeToString(self):
        """The model without its dummy prefix."""
        assert self.normalizer_spec.add_dummy_prefix is False
        return self.data + b"\x1a\x02\x18\x00"


def install(monkeypatch):
    """Lets LlamaTokenizer read tokenizer.model files of sentencepiece's BPE."""
    module = importlib.import_module("transformers.convert_slow_tokenizer")  # the package has a function of the name
    monkeypatch.setattr(module, "requires_backends", lambda *_: None)
    monkeypatch.setattr(module, "import_protobuf", lambda: SimpleNamespace(ModelProto=_Proto))


def slow(monkeypatch, path, legacy=False, added=()):
    """transformers' tokenizer around the SentencePiece library itself."""
    found = SimpleNamespace(ModelProto=_Proto)
    monkeypatch.setattr(tokenization_utils_sentencepiece, "import_protobuf", lambda: found)
    return tokenization_utils_sentencepiece.SentencePieceBackend(
        vocab_file=str(path), legacy=legacy, added_tokens_decoder=dict(added),
        bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
