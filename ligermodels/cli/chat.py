"""`ligermodels generate` and `ligermodels chat`."""

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoint import files, hub
from ligermodels.cli.arguments import UsageError, check_model, dtype
from ligermodels.cli.output import say
from ligermodels.cli.writer import Writer
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError, TokenizerError

if TYPE_CHECKING:
    from ligermodels.arch import CausalLM
    from ligermodels.text import Tokenizer
    from ligermodels.vision import Processor


def model_options() -> argparse.ArgumentParser:
    """A parent parser: which model, and how it is loaded. `load_model` reads what it makes."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "model",
        metavar="MODEL",
        help="repository on the Hub, folder of a checkpoint, GGUF file, or folder of an adapter that names its base",
    )
    shared.add_argument("--adapter", metavar="DIR", help="a LoRA adapter to put over MODEL: train's, or PEFT's")
    shared.add_argument("--revision", help="branch, tag or commit")
    shared.add_argument("--local-files-only", action="store_true", help="use what is cached, never the network")
    shared.add_argument(
        "--allow-pickle", action="store_true", help="read pytorch_model.bin where there is no safetensors file"
    )
    shared.add_argument(
        "--dtype", type=dtype, default="auto", help="such as float32 or bf16; auto, the default: as config.json says"
    )
    kinds = ("int8", "fp8", "int4", "nf4")
    shared.add_argument("--quantize", choices=kinds, help="hold the weights in few bits (docs/operations.md)")
    shared.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8: keys and values in half the memory"
    )
    shared.add_argument("--device", help="such as cpu or cuda:1 (default: cuda if there is one)")
    return shared


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the two commands to the parser."""
    shared = argparse.ArgumentParser(add_help=False, parents=[model_options()])
    shared.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    shared.add_argument("--top-k", type=int, help="draw among the TOP_K likeliest tokens")
    shared.add_argument("--top-p", type=float, help="draw among the likeliest tokens that make up TOP_P")
    shared.add_argument("--min-p", type=float, help="draw among tokens at least MIN_P times as likely as the first")
    shared.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less")
    shared.add_argument("--seed", type=int, help="makes draws repeatable")
    shared.add_argument("--stop", action="append", metavar="TEXT", default=[], help="end before TEXT; repeatable")

    generate = commands.add_parser("generate", parents=[shared], help="continue a text")
    generate.add_argument("--prompt", help="the text (default: stdin)")
    generate.add_argument("--max-new-tokens", type=int, help="default 256, or what the context leaves")
    generate.set_defaults(run=_generate, usual_length=256)

    chat = commands.add_parser("chat", parents=[shared], help="talk to a model, with its chat template")
    chat.add_argument("--system", metavar="TEXT", help="system prompt, also where the template has no role for it")
    chat.add_argument(
        "--image", action="append", metavar="FILE", default=[], help="an image that the first question is about"
    )
    chat.add_argument("--max-new-tokens", type=int, help="per answer; default 1024, or what the context leaves")
    chat.set_defaults(run=_chat, usual_length=1024)


def _generate(args: argparse.Namespace) -> int:
    if args.prompt is None:
        args.prompt = "" if sys.stdin.isatty() else _from_stdin(sys.stdin.read)
    if not args.prompt:
        say("error: nothing to continue: give --prompt TEXT, or pipe a text into stdin")
        return 2
    take_base(args)
    tokenizer = _load_tokenizer(args)
    ids = tokenizer.encode(args.prompt)
    Writer(load_model(args), tokenizer, args).write(ids, tokenizer.eos_token_ids, after=ids)
    return 0


def _chat(args: argparse.Namespace) -> int:
    take_base(args)
    processor = _load_processor(args) if args.image else _load_tokenizer(args)
    start, lead = _opening(processor, args)
    images = _images(args.image)
    writer, messages = Writer(load_model(args), _tokenizer(processor), args), list(start)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):  # Windows does without
            import readline  # noqa: F401  # gives input() a history and line editing
        image = " /image FILE shows an image with the next question," if args.image else ""
        say(f"/reset forgets the conversation,{image} /exit or Ctrl-D ends it, Ctrl-C stops an answer.")
    while (line := _next_line(at_terminal)) is not None:
        line = line.strip()
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
            say("(forgotten)")
        elif line.startswith("/image ") and args.image:
            try:
                images += _images([line.removeprefix("/image ").strip()])
            except InputError as error:
                say(f"error: {error}")
        elif line.startswith("/"):
            say(f"{line.split()[0]} is not a command; there are {'/image FILE, ' * bool(args.image)}/reset and /exit")
        elif line:
            text = line if len(messages) > len(start) else lead + line
            content = [*images, {"type": "text", "text": text}] if images else text
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": _answer(writer, processor, messages)})
            images = []
    return 0


def _images(files: Sequence[str]) -> list[dict[str, Any]]:
    """The content of a message. Raises InputError for a file that is no image."""
    if not files:
        return []
    from ligermodels.vision import load_image

    return [{"type": "image", "image": load_image(file)} for file in files]


def _opening(processor: "Tokenizer | Processor", args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """The system prompt: (messages before the user's first, text at the beginning of that one).

    A template without a system role refuses it (Gemma) or leaves it out; then it begins the first message.
    Raises TokenizerError where there is no chat template, or one that cannot be used.
    """
    if _tokenizer(processor).chat_template is None:
        raise TokenizerError(
            f"{args.model} has no chat template. Likely cause: a base model, which continues a text and gives no "
            f"answers. Next step: `ligermodels generate {args.model} --prompt TEXT`, or its instruct version."
        )
    hello = {"role": "user", "content": "Hello"}
    processor.apply_chat_template([hello], add_generation_prompt=True, tokenize=False)
    if not args.system:
        return [], ""
    system, reason = {"role": "system", "content": args.system}, "the chat template leaves it out"
    try:
        text = processor.apply_chat_template([system, hello], add_generation_prompt=True, tokenize=False)
        if args.system.strip() in str(text):
            return [system], ""
    except TokenizerError as error:
        reason = str(error)
    say(f"note: no system prompt ({reason}); yours begins your first message instead")
    return [], f"{args.system}\n\n"


def _next_line(at_terminal: bool) -> str | None:
    """A line from the user; None at the end of the input."""
    if not at_terminal:
        return _from_stdin(sys.stdin.readline) or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _from_stdin(read: Callable[[], str]) -> str:
    """What a method of sys.stdin reads. Raises InputError where it is no text."""
    try:
        text = read()
        if "\0" not in text:
            return text
        reason = "it has null bytes"
    except UnicodeDecodeError as error:
        reason = f"byte 0x{error.object[error.start]:02x} is not {error.encoding.upper()}"
    raise InputError(f"stdin holds no text ({reason}): a binary file, or a text in another encoding, such as UTF-16")


def _tokenizer(processor: "Tokenizer | Processor") -> "Tokenizer":
    return getattr(processor, "tokenizer", processor)  # type: ignore[arg-type]


def _answer(writer: Writer, processor: Any, messages: list[dict[str, Any]]) -> str:
    """Prints the answer to a conversation and returns it. Ctrl-C ends the answer, not the chat."""
    tokenizer, images, inputs = writer.tokenizer, (), {}
    if processor is tokenizer:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(str(prompt), add_special_tokens=False)
    else:
        inputs = dict(processor.apply_chat_template(messages, add_generation_prompt=True).to(writer.model.device))
        del inputs["attention_mask"]
        ids = inputs.pop("input_ids")[0].tolist()
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = tuple(part["image"] for part in parts if part["type"] == "image")
    return writer.write(ids, tokenizer.chat_stop_ids, images=images, inputs=inputs, interruptible=True)


def take_base(args: argparse.Namespace) -> None:
    """Where MODEL is an adapter, makes it --adapter, and MODEL the base that its config names.

    Raises InputError, CheckpointError for an adapter that is not computed here, HubError where its base is not there.
    """
    given = files.absolute(args.model)
    own = (given / files.ADAPTER).is_file() and not (given / "config.json").exists()
    if own and args.adapter:
        raise InputError(f"{args.model} is an adapter, and so is {args.adapter}: give one, and its base as MODEL")
    if not own and not args.adapter:
        return
    from ligermodels.checkpoint import adapters

    args.adapter = files.absolute(args.model if own else args.adapter)
    found = adapters.read_options(args.adapter, computed=frozenset({"use_dora"}))
    if not own:
        return
    base, args.revision = found.get("base_model_name_or_path"), args.revision or found.get("revision")
    way = f"Next step: give the base as MODEL, and --adapter {args.model}"
    if not base:
        raise CheckpointError(f"{args.adapter / files.ADAPTER} does not name its base model. {way}")
    try:
        hub.resolve(base, revision=args.revision, local_files_only=args.local_files_only, weights=False)
    except HubError as error:
        error.add_note(f"  It is the base that {args.adapter / files.ADAPTER} names. {way}")
        raise
    args.model = base


@contextlib.contextmanager
def _text_files(args: argparse.Namespace) -> Iterator[str | Path]:
    """What tokenizer and processor are read from: MODEL, with the files beside the adapter in the place of its own.

    Called before the model is loaded, so that a wrong template fails before weights are fetched.
    """
    beside = files.companion_files(args.adapter) if args.adapter else {}
    if not beside:
        yield args.model
        return
    folder = hub.resolve(args.model, revision=args.revision, local_files_only=args.local_files_only, weights=False)
    found = {name: folder / name for name in ("config.json", "generation_config.json") if (folder / name).is_file()}
    with tempfile.TemporaryDirectory() as joined:
        for name, path in {**found, **files.companion_files(folder), **beside}.items():
            (Path(joined) / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, Path(joined) / name)
        yield joined


def _load_tokenizer(args: argparse.Namespace) -> "Tokenizer":
    from ligermodels.text import Tokenizer

    with _text_files(args) as source:
        return Tokenizer.from_hub(source, revision=args.revision, local_files_only=args.local_files_only)


def _load_processor(args: argparse.Namespace) -> "Processor":
    try:
        from ligermodels.vision import Processor
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    with _text_files(args) as source:
        return Processor.from_hub(source, revision=args.revision, local_files_only=args.local_files_only)


def load_model(args: argparse.Namespace) -> "CausalLM":
    """The model that `model_options` names, with its adapter, after `take_base`. Raises the errors of loading."""
    check_model(args)
    import torch

    import ligermodels

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {device} cannot be used: {reason}. `ligermodels doctor` says what can") from None
    model = ligermodels.load(
        args.model,
        revision=args.revision,
        local_files_only=args.local_files_only,
        allow_pickle=args.allow_pickle,
        dtype=args.dtype,
        device=device,
        quantization_config=args.quantize,
    )
    if args.adapter:
        from ligermodels.training import load_adapter

        load_adapter(model, args.adapter, dtype=model.dtype, allow_pickle=args.allow_pickle)
    return model
