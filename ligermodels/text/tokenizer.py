"""Text to ids and back, from the files of a checkpoint, without transformers."""

import functools
import operator
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

import torch
from torch import Tensor

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text.chat import ChatTemplates
from ligermodels.text.files import MAX_ID, TokenizerFiles, read_files
from ligermodels.text.json_backend import JsonBackend
from ligermodels.text.sentencepiece_backend import SentencePieceBackend, check_agreement


class Backend(Protocol):
    """What a tokenizer library gives: `JsonBackend` and `SentencePieceBackend` are the two."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def base_vocab_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def decoder(self) -> Mapping[str, Any] | None: ...
    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def id_to_token(self, index: int) -> str | None: ...


class Tokenizer:
    """The tokenizer, the chat templates and the stop ids of one checkpoint.

        tokenizer = ligermodels.Tokenizer.from_hub("meta-llama/Llama-3.2-1B-Instruct")
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        model.generate(torch.tensor([ids]), max_new_tokens=99, eos_token_id=tokenizer.chat_stop_ids)

    bos_token_id, eos_token_id: the tokenizer's own, None if it has none.
    eos_token_ids: every id that ends a text: generation_config.json's, config.json's and the tokenizer's.
    chat_stop_ids: those and the one that ends a turn of the chat template.
    pad_token_id: the tokenizer's own pad token; else pad_token_id of generation_config.json or config.json;
    else the first of eos_token_ids; else 0. The mask hides padding, so that any id will do.
    vocab_size: one more than the largest id, added tokens included.
    """

    def __init__(self, files: TokenizerFiles, backend: Backend) -> None:
        self.files = files
        self.backend = backend
        self.vocab_size = backend.vocab_size
        ids = {name: backend.token_to_id(token) for name, token in files.named.items()}
        for name in ("bos_token", "eos_token"):
            if name in files.named and ids[name] is None:
                raise TokenizerError(
                    f"{files.folder}: {name} is {short(files.named[name])}, which has no id. Likely cause: an "
                    "added token is missing from tokenizer.json or added_tokens.json."
                )
        missing = {*files.named.values(), *files.extra_special}
        missing -= {token for token in missing if backend.token_to_id(token) is not None}
        if missing:
            text = f"{files.folder}: special tokens without an id, left out: {short(sorted(missing))}"
            warnings.warn(text, stacklevel=3)
        self.bos_token_id = ids.get("bos_token")
        own = [index for index in (ids.get("eos_token"),) if index is not None]
        self.eos_token_ids = tuple(dict.fromkeys((*files.eos_token_ids, *own)))
        self.eos_token_id = next(iter(own or self.eos_token_ids), None)
        pads = (ids.get("pad_token"), files.pad_token_id, *self.eos_token_ids, 0)
        self.pad_token_id = next(index for index in pads if index is not None)
        self._adds_bos = self.bos_token_id in backend.encode([""], True)[0][:1]
        variables = {name: token for name, token in files.named.items() if ids[name] is not None}
        extra = {"additional_special_tokens": list(files.extra_special)} if files.extra_special else {}
        self._chat = ChatTemplates(files.templates, variables | extra, files.folder)

    @classmethod
    def from_hub(
        cls,
        id_or_folder: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "Tokenizer":
        """From a repository id or a folder. Downloads no weights. Raises HubError, TokenizerError."""
        from ligermodels import hub

        folder = hub.resolve(
            id_or_folder,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            weights=False,
        )
        return cls.from_folder(folder)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """From tokenizer.json, else from tokenizer.model. Raises TokenizerError."""
        files = read_files(folder)
        json_path, model_path = files.path("tokenizer.json"), files.path("tokenizer.model")
        backend: Backend
        if json_path:
            backend = JsonBackend(json_path, files)
            if model_path:
                check_agreement(model_path, backend.id_to_token)
        elif model_path:
            backend = SentencePieceBackend(model_path, files)
        else:
            names = sorted(path.name for path in files.folder.iterdir())[:20]
            raise TokenizerError(
                f"{files.folder} has neither tokenizer.json nor tokenizer.model; it has {names}. Next step: "
                "take the tokenizer's files from the checkpoint's repository (vocab.json, merges.txt and "
                "tekken.json are not read by themselves)."
            )
        if files.model_vocab_size is not None and backend.base_vocab_size > files.model_vocab_size:
            raise TokenizerError(
                f"{files.folder}: the vocabulary has {backend.base_vocab_size} ids, the model's embedding "
                f"{files.model_vocab_size} rows (vocab_size of config.json). Likely cause: the tokenizer of "
                "another checkpoint."
            )
        return cls(files, backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`.

        With add_special_tokens, what the checkpoint puts around a text is added (BOS for most, EOS for few),
        except a BOS before a text that begins with the BOS token already, as the output of a chat template
        does. Without it nothing is added. Either way special tokens written out in the text become their ids.
        """
        return self._encode_many([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], padding_side: str = "left", add_special_tokens: bool = True
    ) -> tuple[Tensor, Tensor]:
        """(input_ids, attention_mask), both int64 [B, S], S the longest; the mask is 1 on real tokens."""
        if isinstance(texts, str) or not isinstance(texts, Iterable) or padding_side not in ("left", "right"):
            raise InputError(
                "encode_batch takes a list of texts and padding_side 'left' or 'right', "
                f"not {type(texts).__name__} and {short(padding_side)}."
            )
        rows = self._encode_many(list(texts), add_special_tokens)
        width = max(map(len, rows), default=0)
        input_ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(rows):
            place = slice(width - len(ids), width) if padding_side == "left" else slice(0, len(ids))
            input_ids[row, place] = torch.tensor(ids, dtype=torch.int64)
            attention_mask[row, place] = 1
        return input_ids, attention_mask

    def decode(self, ids: Iterable[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of a list or 1-D tensor of ids. Ids without a token (a padded vocabulary) add nothing.

        Bytes that are in no UTF-8 character become U+FFFD; in a run of byte tokens (Llama 2, Gemma) the good
        characters stay, as in SentencePiece, where the tokenizers library gives up the whole run.
        """
        try:
            values = list(map(operator.index, ids.tolist() if isinstance(ids, Tensor) else ids))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"decode takes one text: a list of ints or a 1-D tensor of them, not {short(ids)}. Decode a batch by "
                "rows."
            ) from error
        if wrong := [index for index in values if not 0 <= index <= MAX_ID]:
            raise InputError(f"{short(wrong[0])} is not a token id. Likely cause: labels, where -100 means ignored.")
        return self.backend.decode(values, skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it, None if it has none."""
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        template: str | None = None,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """The conversation as ids, or as text with tokenize=False.

        messages: [{"role": ..., "content": ...}, ...]. tools: JSON schemas. template: the name of one of the
        checkpoint's templates, or a template's text; by default "tool_use" if there are tools and it exists,
        else "default". variables: whatever else the template reads. The ids are those of the text without
        special tokens around it: the template writes its own BOS. Raises TokenizerError, with the template's
        own message where it refuses the conversation; limits on what a template may do:
        `ligermodels.text.sandbox`.
        """
        text = self._chat.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @functools.cached_property
    def chat_stop_ids(self) -> tuple[int, ...]:
        """`eos_token_ids`, and the special token with which the chat template closes an assistant's turn.

        The files of some checkpoints name the end of a text only: Gemma 1 lists <eos>, and its turns end with
        <end_of_turn>. So the template is asked: a conversation of a user's and an assistant's message is
        rendered, and the first special token behind the assistant's text is the turn's end. Nothing is added
        where none follows (turns in plain text: use stop strings) or where there is no default template.
        """
        tail = self.backend.encode([self._chat.turn_end()], False)[0]
        special = self.backend.special_ids
        closing = [index for index in tail if index in special][:1]
        return tuple(dict.fromkeys((*self.eos_token_ids, *closing)))

    def save(self, folder: str | Path) -> None:
        """Copies the tokenizer's and templates' files byte for byte; config.json and the like stay behind."""
        for source in self.files.copied:
            target = Path(folder) / source.relative_to(self.files.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists() and target.samefile(source):
                continue
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copyfile(source, partial)
            os.replace(partial, target)

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.files.folder)!r}, vocab_size={self.vocab_size})"

    def _encode_many(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            if not isinstance(text, str):
                raise TokenizerError(f"text must be a str, not {type(text).__name__}. Next step: decode bytes first.")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"the text has a lone surrogate {text[error.start]!r} at position {error.start}, which "
                    "has no UTF-8. Likely cause: half of a pair from JSON or UTF-16; errors='replace' mends "
                    "it."
                ) from error
        rows = self.backend.encode(texts, add_special_tokens)
        if add_special_tokens and self._adds_bos:
            rows = [ids[1:] if ids[1:2] == [self.bos_token_id] else ids for ids in rows]
        return rows
