"""`ligermodels generate` and `ligermodels chat`."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ligermodels.cli.models import load_model, load_processor, load_tokenizer, model_options, resolve_adapter
from ligermodels.cli.output import say
from ligermodels.cli.writer import Writer
from ligermodels.errors import InputError, TokenizerError

if TYPE_CHECKING:
    from ligermodels.text import Tokenizer
    from ligermodels.vision import Processor

_EPILOG = """\
Tokens are drawn as MODEL's generation_config.json says; where it says nothing, the likeliest is taken. Options win.
"""
_CHAT_EPILOG = """\
Each line is a question, and may be piped: echo "Who are you?" | ligermodels chat MODEL
The line /reset starts a new conversation, /exit ends; with --image, /image FILE adds one to the next question.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the two commands to the parser."""
    shared = argparse.ArgumentParser(add_help=False, parents=[model_options()])
    option = shared.add_argument
    option("--temperature", type=float, metavar="X", help="0: always the likeliest token (as the model's files say)")
    option("--top-k", type=int, metavar="N", help="sample among the N likeliest tokens")
    option("--top-p", type=float, metavar="X", help="sample among the likeliest tokens whose probabilities sum to X")
    option("--min-p", type=float, metavar="X", help="sample among tokens at least X times as likely as the likeliest")
    option("--repetition-penalty", type=float, metavar="X", help="above 1: fewer repetitions")
    option("--seed", type=int, metavar="N", help="makes sampling repeatable")
    option(
        "--stop",
        action="append",
        type=_stop,
        metavar="TEXT",
        default=[],
        help="end before TEXT; may be given several times",
    )
    drafter = shared.add_mutually_exclusive_group().add_argument
    drafter(
        "--prompt-lookup-num-tokens",
        type=int,
        metavar="N",
        help="propose N tokens that followed the same words earlier: the same text in fewer steps, also below",
    )
    drafter("--medusa", metavar="DIR", help="propose tokens by the heads in DIR, which `train medusa` has written")
    drafter("--use-mtp", action="store_true", help="propose tokens by the model's layer for multi-token prediction")

    generate = commands.add_parser("generate", help="continue a text", parents=[shared], epilog=_EPILOG)
    generate.add_argument("--prompt", metavar="TEXT", help="the text to continue (stdin)")
    generate.add_argument("--max-new-tokens", type=int, metavar="N", help="(256, less at the end of the context)")
    generate.set_defaults(run=_generate, default_length=256)

    chat = commands.add_parser(
        "chat", help="chat with a model, using its chat template", parents=[shared], epilog=_CHAT_EPILOG + _EPILOG
    )
    chat.add_argument(
        "--system", metavar="TEXT", help="system prompt; begins your first message if there is no such role"
    )
    chat.add_argument(
        "--image", action="append", metavar="FILE", default=[], help="an image for the first question; repeatable"
    )
    chat.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="per answer (1024, less at the end of the context)"
    )
    chat.set_defaults(run=_chat, default_length=1024)


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a text to end before must not be empty")
    return text


def _generate(args: argparse.Namespace) -> int:
    if args.prompt is None:
        args.prompt = "" if sys.stdin.isatty() else _read_stdin(sys.stdin.read)
    if not args.prompt:
        say("error: nothing to continue: give --prompt TEXT, or pipe a text into stdin")
        return 2
    resolve_adapter(args)
    tokenizer = load_tokenizer(args)
    ids = tokenizer.encode(args.prompt)
    Writer(load_model(args), tokenizer, args).write(ids, tokenizer.eos_token_ids, after=ids)
    return 0


def _chat(args: argparse.Namespace) -> int:
    resolve_adapter(args)
    processor = load_processor(args) if args.image else load_tokenizer(args)
    start, prefix = _system_prompt(processor, args)
    images = _images(args.image)
    writer, messages = Writer(load_model(args), _tokenizer(processor), args), list(start)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # gives input() a history and line editing
        image = " /image FILE adds an image to the next question," if args.image else ""
        say(f"/reset starts a new conversation,{image} /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    while (line := _next_line(at_terminal)) is not None:
        line = line.strip()
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
            say("(new conversation)")
        elif line.startswith("/image ") and args.image:
            try:
                images += _images([line.removeprefix("/image ").strip()])
            except InputError as error:
                say(f"error: {error}")
        elif line.startswith("/"):
            known = f"{'/image FILE, ' * bool(args.image)}/reset and /exit"
            say(f"{line.split()[0]} is not a command; there are {known}")
        elif line:
            text = line if len(messages) > len(start) else prefix + line
            content = [*images, {"type": "text", "text": text}] if images else text
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": _answer(writer, processor, messages)})
            images = []
    return 0


def _images(files: Sequence[str]) -> list[dict[str, Any]]:
    """The parts of a message for image files. Raises InputError for a file that is not an image."""
    if not files:
        return []
    from ligermodels.vision import load_image

    return [{"type": "image", "image": load_image(file)} for file in files]


def _system_prompt(processor: "Tokenizer | Processor", args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """--system as (messages before the user's first, text at the beginning of that one).

    A template without a system role refuses it (Gemma) or drops it; then it begins the first message.
    Raises TokenizerError where there is no chat template, or one that cannot be used.
    """
    if _tokenizer(processor).chat_template is None:
        raise TokenizerError(
            f"{args.model} has no chat template. Likely cause: a base model, which continues texts and does not "
            f"answer. Next step: `ligermodels generate {args.model} --prompt TEXT`, or its instruct version."
        )
    hello = {"role": "user", "content": "Hello"}
    processor.apply_chat_template([hello], add_generation_prompt=True, tokenize=False)
    if not args.system:
        return [], ""
    system, reason = {"role": "system", "content": args.system}, "the chat template drops it"
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
        return _read_stdin(sys.stdin.readline) or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _read_stdin(read: Callable[[], str]) -> str:
    """What a method of sys.stdin returns. Raises InputError where that is not text."""
    try:
        text = read()
        if "\0" not in text:
            return text
        reason = "it has null bytes"
    except UnicodeDecodeError as error:
        reason = f"byte 0x{error.object[error.start]:02x} is not {error.encoding.upper()}"
    raise InputError(
        f"stdin is not text ({reason}). Likely cause: a binary file, or a text in another encoding, such as UTF-16"
    )


def _tokenizer(processor: "Tokenizer | Processor") -> "Tokenizer":
    return getattr(processor, "tokenizer", processor)  # type: ignore[arg-type]


def _answer(writer: Writer, processor: Any, messages: list[dict[str, Any]]) -> str:
    """Prints the answer to a conversation and returns it as later turns have it. Ctrl-C ends it, not the chat."""
    from ligermodels.text import StopStrings
    from ligermodels.text.harmony import PROMPT_END, HarmonyDecoder

    tokenizer, images, inputs, harmony = writer.tokenizer, (), {}, None
    if processor is tokenizer:
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        harmony = HarmonyDecoder(tokenizer) if prompt.endswith(PROMPT_END) else None
    else:
        inputs = dict(processor.apply_chat_template(messages, add_generation_prompt=True).to(writer.model.device))
        del inputs["attention_mask"]
        ids = inputs.pop("input_ids")[0].tolist()
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = tuple(part["image"] for part in parts if part["type"] == "image")
    options: Any = dict(decoder=harmony, images=images, inputs=inputs, interruptible=True)
    text = writer.write(ids, tokenizer.chat_stop_ids, **options)
    if harmony is None:
        return text
    stops = StopStrings(writer.args.stop)
    return stops.put(harmony.content)[0] + stops.flush()
