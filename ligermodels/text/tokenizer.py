"""The tokenizer of a checkpoint folder, without transformers."""

import difflib
import functools
import inspect
import operator
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from ligermodels.errors import InputError, TokenizerError, warn_once
from ligermodels.text import batch, saving
from ligermodels.text.backend import Backend, Encoded
from ligermodels.text.batch import BatchEncoding
from ligermodels.text.chat import ChatTemplate, ChatTemplates
from ligermodels.text.files import TokenizerFiles, call_settings, read_files, read_text
from ligermodels.text.vocabulary import NAMES, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

_NO_LIMIT = 10**20
"""As in transformers, a larger model_max_length means no limit."""
_CACHED = ("special_tokens_map", "_chat", "_adds_bos", "_special_tokens_around", "chat_stop_ids")
"""Computed from the files on first use, and again after a change."""


class Tokenizer(Vocabulary):
    """The tokenizer, the chat templates and the stop ids of one checkpoint.

        tokenizer = ligermodels.Tokenizer.from_hub("meta-llama/Llama-3.2-1B-Instruct")
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        model.generate(torch.tensor([ids]), max_new_tokens=99, eos_token_id=tokenizer.chat_stop_ids)

    A call returns the same as a call of transformers' tokenizer. Tokens and ids: `Vocabulary`.

    chat_stop_ids: `eos_token_ids` and the id that ends a turn of the chat template.
    padding_side, truncation_side, model_max_length: the defaults of calls; may be set.
    name_or_path: the argument of `from_hub`.
    """

    model_input_names = ("input_ids", "attention_mask")  # transformers.Trainer reads them
    padding_side: str
    truncation_side: str
    model_max_length: int

    def __init__(self, files: TokenizerFiles, backend: Backend, name_or_path: str = "") -> None:
        self.files = self._loaded = files = backend.complete(files)
        self.backend = backend
        self.name_or_path = name_or_path or str(files.folder)
        for name in ("bos_token", "eos_token"):
            if name in files.named and backend.token_to_id(files.named[name]) is None:
                raise TokenizerError(
                    f"{files.folder}: {name} is {short(files.named[name])}, which has no id. Likely cause: an "
                    "added token is missing from tokenizer.json or added_tokens.json."
                )
        special = {*files.named.values(), *files.extra_special}
        if missing := sorted(token for token in special if backend.token_to_id(token) is None):
            text = f"{files.folder}: these special tokens have no id and are ignored: {short(missing)}"
            warnings.warn(text, stacklevel=3)
        for name, value in call_settings(files.config, files.folder).items():
            setattr(self, name, value)

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
        from ligermodels.checkpoint import hub

        folder = hub.resolve(
            id_or_folder,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            weights=False,
        )
        return cls.from_folder(folder, name_or_path=str(id_or_folder))

    from_pretrained = from_hub

    @classmethod
    def from_folder(cls, folder: str | Path, *, name_or_path: str = "") -> "Tokenizer":
        """From tokenizer.json, tekken.json, tokenizer.model or tokenizer.model.vN. Raises TokenizerError."""
        files = read_files(folder)
        backend = Backend(files)
        if files.model_vocab_size is not None and backend.base_vocab_size > files.model_vocab_size:
            raise TokenizerError(
                f"{files.folder}: the vocabulary has {backend.base_vocab_size} ids, the model's embedding "
                f"{files.model_vocab_size} rows (vocab_size of config.json). Likely cause: the tokenizer of "
                "another checkpoint."
            )
        return cls(files, backend, name_or_path)

    # ---- text to ids ----

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        """The ids of one text: a list of ints, or what a call with the same options returns as input_ids.

        add_special_tokens adds the checkpoint's special tokens around a text (BOS for most, EOS for few), but no BOS
        before a text that begins with BOS, such as the output of a chat template. Special tokens that are written in
        the text become their ids in any case.
        """
        if isinstance(text, list | tuple):
            raise InputError(
                "encode takes one text, not a list. Next step: tokenizer(texts)['input_ids'] for lists of ids, or "
                "tokenizer(texts, padding=True, return_tensors='pt') for tensors with padding."
            )
        return self(text, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | None = None,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_offsets_mapping: bool = False,
    ) -> BatchEncoding:
        """input_ids and attention_mask of a text or of a list of them, as transformers' tokenizer returns them.

        Lists of ints, [S] for a text and [B][S] for a list; int64 tensors [B, S] with return_tensors="pt".
        padding: True or "longest", "max_length", or False. truncation: True truncates to max_length, else to
        model_max_length if the folder has one; max_length alone, without padding, truncates too.
        return_offsets_mapping: also offset_mapping, the (start, end) in the text of each token.
        Pairs of texts, texts split into words and overflowing tokens are not supported. One difference: a text that
        begins with the BOS token gets no second one (`encode`).
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple):
            raise InputError(f"a tokenizer is called with a text or a list of texts, not with {short(text)}.")
        if truncation is None:
            truncation = max_length is not None and padding is False
        rows = self._encode(list(texts), add_special_tokens, return_offsets_mapping)
        columns: dict[str, list[Any]] = {"input_ids": [row.ids for row in rows]}
        if return_offsets_mapping:
            columns["offset_mapping"] = [row.offsets for row in rows]
        return self._batch(
            columns,
            is_batch=not isinstance(text, str),
            around=self._special_tokens_around if add_special_tokens and truncation else (0, 0),
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            padding_side=padding_side,
            return_tensors=return_tensors,
        )

    def _batch(
        self,
        columns: batch.Columns,
        *,
        is_batch: bool,
        around: tuple[int, int],
        padding: bool | str,
        truncation: bool,
        max_length: int | None,
        padding_side: str | None,
        return_tensors: str | None,
    ) -> BatchEncoding:
        """Adds an attention mask, truncates, pads and makes tensors, by the options of a call. Raises InputError.

        is_batch: whether rows without tensors have a batch dimension. around: the number of special tokens before and
        after each text.
        """
        side = self.padding_side if padding_side is None else padding_side
        for name, value, allowed in (
            ("padding", padding, (True, False, "longest", "max_length")),
            ("truncation", truncation, (True, False)),
            ("return_tensors", return_tensors, (None, "pt")),
            ("padding_side", side, ("left", "right")),
            ("truncation_side", self.truncation_side, ("left", "right")),
        ):
            if value not in allowed:
                raise InputError(f"{name} must be one of {allowed}, not {short(value)}.")
        limit = max_length
        if limit is None and self.model_max_length <= _NO_LIMIT:
            limit = int(self.model_max_length)
        if truncation and limit is not None:
            columns = batch.truncate(columns, limit, self.truncation_side, around)
        rows = columns["input_ids"]
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], **columns}
        width = limit if padding == "max_length" else max(map(len, rows), default=0)
        if padding and width is not None:
            if padding != "max_length" and max_length is not None and not truncation:
                warnings.warn("max_length is ignored: padding=True pads to the longest row.", stacklevel=3)
            if self.pad_token_id is None:
                raise InputError(
                    "the tokenizer has no pad token. Next step: tokenizer.pad_token = tokenizer.eos_token, or another "
                    "token of the vocabulary."
                )
            columns = batch.pad(columns, width, side, self.pad_token_id)
        if return_tensors:
            return batch.as_tensors(columns)
        return BatchEncoding(columns if is_batch else {name: rows[0] for name, rows in columns.items()})

    def _encode(self, texts: list[str], add_special_tokens: bool, with_offsets: bool = False) -> list[Encoded]:
        for text in texts:
            if not isinstance(text, str):
                raise TokenizerError(f"text must be a str, not {type(text).__name__}. Next step: decode bytes first.")
            if not text.isascii() and (surrogate := re.search("[\ud800-\udfff]", text)):
                raise TokenizerError(
                    f"the text has a lone surrogate {surrogate[0]!r} at position {surrogate.start()}, which has no "
                    "UTF-8. Likely cause: half of a pair from JSON or UTF-16; errors='replace' replaces it."
                )
        rows = self.backend.encode(texts, add_special_tokens, with_offsets)
        if not (add_special_tokens and self._adds_bos):
            return rows
        # A text that begins with BOS keeps its own.
        doubled = [row.ids[1:2] == [self.bos_token_id] for row in rows]
        return [
            Encoded(ids[1:], offsets and offsets[1:]) if two else Encoded(ids, offsets)
            for (ids, offsets), two in zip(rows, doubled, strict=True)
        ]

    @functools.cached_property
    def _adds_bos(self) -> bool:
        return self.bos_token_id in self.backend.encode([""], True)[0].ids[:1]

    @functools.cached_property
    def _special_tokens_around(self) -> tuple[int, int]:
        """The number of special tokens before a text, and after it."""
        inner, whole = (self.backend.encode(["a"], flag)[0].ids for flag in (False, True))
        more = len(whole) - len(inner)
        before = next((n for n in range(more + 1) if whole[n : n + len(inner)] == inner), None)
        if before is None:
            raise TokenizerError(
                f"{self.files.folder}: special tokens are not only around a text; truncation is not supported."
            )
        return before, more - before

    # ---- ids to text ----

    def decode(
        self,
        token_ids: "int | Iterable[int] | Tensor",
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of an id, or of a list, array or 1-D tensor of ids.

        Ids without a token (a padded vocabulary) add nothing. Spaces are never cleaned up. Bytes that are not UTF-8
        become U+FFFD; the valid characters in a run of byte tokens (Llama 2, Gemma) stay, as in SentencePiece, where
        the tokenizers library replaces the whole run.
        """
        if clean_up_tokenization_spaces:
            raise InputError("clean_up_tokenization_spaces is for WordPiece; here it would remove spaces of the text.")
        try:
            values: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
            ids = list(map(operator.index, values if isinstance(values, Iterable) else [values]))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"decode takes one text: an int, a list of them or a 1-D tensor, not {short(token_ids)}. Decode a "
                "batch by rows, or with batch_decode."
            ) from error
        if ids and min(ids) < 0:
            raise InputError(f"{min(ids)} is not a token id. Likely cause: labels, where -100 means ignored.")
        return self.backend.decode(ids, skip_special_tokens)

    def batch_decode(
        self,
        sequences: "Iterable[Iterable[int] | Tensor] | Tensor",
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in sequences]

    # ---- chat ----

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The template, or a dict by name if there are others than "default"; may be set, also to None."""
        templates = dict(self.files.templates)
        return templates["default"] if list(templates) == ["default"] else templates or None

    @chat_template.setter
    def chat_template(self, value: str | Mapping[str, str] | None) -> None:
        templates = dict(value) if isinstance(value, Mapping) else {} if value is None else {"default": value}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TokenizerError(f"chat_template must be a text, a dict of texts or None, not {short(value)}.")
        self._change(templates=templates, template_file=None)

    def read_chat_template(self, file: str | Path) -> None:
        """Sets the chat template to that of a file, which errors of the template then name.

        Raises TokenizerError for a file that cannot be read, and for a syntax error.
        """
        path = Path(file).expanduser()
        self._change(templates={"default": read_text(path)}, template_file=path)
        self._chat.choose().compile()

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        return_assistant_tokens_mask: bool = False,
        **variables: Any,
    ) -> Any:
        """The ids of a conversation; its text with tokenize=False; the dict of a call with return_dict=True.

        As in transformers, but there return_dict is True by default. A list of conversations gives a list of texts, or
        a batch.

        conversation: [{"role": ..., "content": ...}, ...]. Keys that are None are dropped. A content may be a list of
        parts, {"type": "text", "text": ...}; their texts are joined for a template that does not print parts.
        `reasoning_content`, `reasoning` and `thinking` are the same.
        tools: JSON schemas; `transformers.utils.get_json_schema` makes one of a Python function.
        chat_template: the name of one of the checkpoint's templates, or a template's text; by default "tool_use" if
        there are tools and it exists, else "default". No special tokens are added around the text, because the
        template writes its own BOS.
        continue_final_message: ends the text after the content of the last message, without the end of its turn.
        padding, truncation, max_length, padding_side, return_tensors: as in a call.
        return_assistant_tokens_mask: also assistant_masks, 1 for each token with a character inside
        {% generation %} ... {% endgeneration %} of the template; needs return_dict=True.
        variables: other variables that the template reads, such as enable_thinking or documents. A warning names one
        that it does not read.
        Raises InputError; TokenizerError, with the template's own message where it refuses the conversation.
        """
        if return_assistant_tokens_mask and not (return_dict and tokenize):
            raise InputError("return_assistant_tokens_mask needs return_dict=True and tokenize=True.")
        is_batch = isinstance(conversation, list | tuple) and isinstance(next(iter(conversation), None), list | tuple)
        template = self._chat.choose(chat_template, tools is not None)
        _check_names(variables, template)
        schemas = None if tools is None else _schemas(tools)
        rendered = [
            template.render(
                chat,
                tools=schemas,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
                with_spans=return_assistant_tokens_mask,
            )
            for chat in (conversation if is_batch else [conversation])
        ]
        texts = [text for text, _ in rendered]
        if not tokenize:
            return texts if is_batch else texts[0]
        rows = self._encode(texts, add_special_tokens=False, with_offsets=return_assistant_tokens_mask)
        columns: dict[str, list[Any]] = {"input_ids": [row.ids for row in rows]}
        if return_assistant_tokens_mask:
            pairs = zip(rows, rendered, strict=True)
            columns["assistant_masks"] = [batch.mask_of(row.offsets or (), spans) for row, (_, spans) in pairs]
        encoded = self._batch(
            columns,
            is_batch=is_batch,
            around=(0, 0),
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            padding_side=padding_side,
            return_tensors=return_tensors,
        )
        return encoded if return_dict else encoded["input_ids"]

    @functools.cached_property
    def chat_stop_ids(self) -> tuple[int, ...]:
        """`eos_token_ids`, and the special token with which the chat template ends an assistant's turn.

        Some checkpoints list only the end of a text: Gemma 1 lists <eos>, but its turns end with <end_of_turn>. So
        the default template renders a user's and an assistant's message, and the first special token after the
        assistant's text ends the turn. Templates that end turns in plain text need stop strings.
        """
        after = self.backend.encode([self._chat.turn_end()], False)[0].ids
        special = self.backend.special_ids
        turn_end = [index for index in after if index in special][:1]
        return tuple(dict.fromkeys((*self.eos_token_ids, *turn_end)))

    @functools.cached_property
    def _chat(self) -> ChatTemplates:
        names = {name: token for name, token in self.files.named.items() if self.token_to_id(token) is not None}
        extra = {"additional_special_tokens": list(self.files.extra_special)} if self.files.extra_special else {}
        source = None
        if self.files.templates != self._loaded.templates:
            source = "that was set" if self.files.template_file is None else str(self.files.template_file)
        return ChatTemplates(self.files.templates, names | extra, self.files.folder, source)

    # ---- saving and copies ----

    def save_pretrained(self, save_directory: str | Path) -> tuple[str, ...]:
        """Writes the tokenizer's files with all changes since they were read. Returns their paths.

        Unchanged files are copied byte for byte; config.json is not among them. Files of another tokenizer in the
        folder are removed. Raises HubError, TokenizerError.
        """
        settings = {name: getattr(self, name) for name in call_settings(self.files.config, self.files.folder)}
        target = Path(save_directory).expanduser()
        paths = saving.write(target, saving.contents(self._loaded, self.files, self.backend, settings))
        if os.path.samefile(target, self.files.folder):
            self.files = self._loaded = self.backend.complete(read_files(self.files.folder))
        return paths

    save = save_pretrained

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.files.folder)!r}, vocab_size={self.vocab_size})"

    def _change(self, **fields: Any) -> None:
        super()._change(**fields)
        for name in _CACHED:
            self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _CACHED}


def _schemas(tools: Any) -> list[Mapping[str, Any]]:
    """The tools, which must be JSON schemas."""
    if not isinstance(tools, list | tuple):
        raise InputError(f"tools must be a list of JSON schemas (dicts), not {short(tools)}.")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise InputError(
                f"a tool is a JSON schema (a dict), not {short(tool)}. Next step: transformers.utils.get_json_schema "
                "makes one of a Python function with type hints and a docstring."
            )
    return list(tools)


def _check_names(variables: Mapping[str, Any], template: ChatTemplate) -> None:
    """Warns, once, of a variable that the template does not read."""
    read = template.compile().variables if variables else frozenset()
    if not (unknown := sorted(variables.keys() - read)):
        return
    options = inspect.signature(Tokenizer.apply_chat_template).parameters.keys() - {"self", "variables"}
    names = sorted(read - options - set(NAMES))
    nearest = difflib.get_close_matches(unknown[0], [*options, *names], 1)
    others = f"Variables of the template: {short(names)}." if names else "Next step: leave it out."
    hint = f"The nearest known name is {nearest[0]!r}." if nearest else others
    text = f"{unknown[0]!r} is no argument of apply_chat_template, and {template.where} does not read it. {hint}"
    warn_once(f"template variable {unknown[0]}: {template.where}", text)
