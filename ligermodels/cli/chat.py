"""`ligermodels generate` and `ligermodels chat`."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ligermodels.cli.output import say
from ligermodels.errors import ConfigError, InputError, TokenizerError

if TYPE_CHECKING:
    from ligermodels.arch import CausalLM
    from ligermodels.text import Tokenizer
    from ligermodels.vision import Processor


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the two commands to the parser."""
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", metavar="MODEL", help="repository on the Hub, or folder of a checkpoint")
    model.add_argument("--revision", help="branch, tag or commit")
    model.add_argument("--local-files-only", action="store_true", help="use what is cached, never the network")
    model.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pytorch_model.bin where there is no safetensors file",
    )

    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    sampling.add_argument("--top-k", type=int, help="draw among the TOP_K likeliest tokens")
    sampling.add_argument("--top-p", type=float, help="draw among the likeliest tokens that make up TOP_P")
    sampling.add_argument("--min-p", type=float, help="draw among tokens at least MIN_P times as likely as the first")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less")
    sampling.add_argument("--seed", type=int, help="makes draws repeatable")
    sampling.add_argument("--stop", action="append", metavar="TEXT", default=[], help="end before TEXT; repeatable")
    sampling.add_argument(
        "--dtype",
        default="auto",
        help="float32, float16, bfloat16, or auto, the default: as config.json says",
    )
    sampling.add_argument("--device", help="such as cpu or cuda:1 (default: cuda if there is one)")

    generate = commands.add_parser("generate", parents=[model, sampling], help="continue a text")
    generate.add_argument("--prompt", help="the text (default: what stdin holds)")
    generate.add_argument("--max-new-tokens", type=int, help="default 256, or what the context leaves")
    generate.set_defaults(run=_generate, usual_length=256)

    chat = commands.add_parser("chat", parents=[model, sampling], help="talk to a model, with its chat template")
    chat.add_argument("--system", metavar="TEXT", help="system prompt, also where the template has no role for it")
    chat.add_argument(
        "--image", action="append", metavar="FILE", default=[], help="an image that the first question is about"
    )
    chat.add_argument("--max-new-tokens", type=int, help="per answer; default 1024, or what the context leaves")
    chat.set_defaults(run=_chat, usual_length=1024)


def _generate(args: argparse.Namespace) -> int:
    if args.prompt is None:
        if sys.stdin.isatty():
            say("error: nothing to continue: give --prompt TEXT, or pipe a text into stdin")
            return 2
        args.prompt = sys.stdin.read()
    tokenizer = _load_tokenizer(args)
    ids = tokenizer.encode(args.prompt)
    pieces = _Answer(_load_model(args), tokenizer, ids, tokenizer.eos_token_ids, args, after=ids)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    say(pieces.speed())
    return 0


def _chat(args: argparse.Namespace) -> int:
    processor = _load_processor(args) if args.image else _load_tokenizer(args)
    start, lead = _opening(processor, args)
    images = _images(args.image)
    model, messages = _load_model(args), list(start)
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
            messages.append({"role": "user", "content": [*images, _text(text)] if images else text})
            messages.append({"role": "assistant", "content": _answer(model, processor, messages, args)})
            images = []
    return 0


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _images(files: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of a message. Raises InputError for a file that is no image."""
    if not files:
        return []
    from ligermodels.vision import load_image

    return [{"type": "image", "image": load_image(file)} for file in files]


def _opening(processor: "Tokenizer | Processor", args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """(messages before the user's first, text before that one): the one or the other is the system prompt.

    A template without a system role refuses it (Gemma) or leaves it out; then it begins the first message.
    Raises TokenizerError where there is nothing to talk to: no template, or one that cannot be used.
    """
    if not _tokenizer(processor).files.templates:
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
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _tokenizer(processor: "Tokenizer | Processor") -> "Tokenizer":
    return getattr(processor, "tokenizer", processor)  # type: ignore[arg-type]


def _answer(model: "CausalLM", processor: Any, messages: list[dict[str, Any]], args: argparse.Namespace) -> str:
    tokenizer, seen = _tokenizer(processor), {}
    if processor is tokenizer:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(str(prompt), add_special_tokens=False)
    else:
        seen = dict(processor.apply_chat_template(messages, add_generation_prompt=True).to(model.device))
        del seen["attention_mask"]  # of one conversation
        ids = seen.pop("input_ids")[0].tolist()
    pieces, text = _Answer(model, tokenizer, ids, tokenizer.chat_stop_ids, args, seen=seen), ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        say(" (stopped)", end="")
    print()
    say(pieces.speed())
    return text


def _load_tokenizer(args: argparse.Namespace) -> "Tokenizer":
    """Before the model, so that what is wrong with a prompt or a template shows before any weight is fetched."""
    from ligermodels.text import Tokenizer

    return Tokenizer.from_hub(args.model, revision=args.revision, local_files_only=args.local_files_only)


def _load_processor(args: argparse.Namespace) -> "Tokenizer | Processor":
    try:
        from ligermodels.vision import Processor
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    return Processor.from_hub(args.model, revision=args.revision, local_files_only=args.local_files_only)


def _load_model(args: argparse.Namespace) -> "CausalLM":
    import torch

    import ligermodels

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {device} cannot be used: {reason}. `ligermodels doctor` says what can") from None
    return ligermodels.load(
        args.model,
        revision=args.revision,
        local_files_only=args.local_files_only,
        allow_pickle=args.allow_pickle,
        dtype=args.dtype,
        device=device,
    )


class _Answer:
    """The text that continues `ids`, in pieces as they become certain, and how fast they came.

    after: the ids that the text goes on from; () where it begins anew, as an answer does. seen: the images.
    """

    def __init__(
        self,
        model: "CausalLM",
        tokenizer: "Tokenizer",
        ids: list[int],
        stop_ids: Sequence[int],
        args: argparse.Namespace,
        *,
        after: Sequence[int] = (),
        seen: Mapping[str, Any] | None = None,
    ):
        self.model, self.tokenizer, self.ids, self.stop_ids, self.args = model, tokenizer, ids, stop_ids, args
        self.after, self.seen = after, seen or {}
        self.times: list[float] = []

    def __iter__(self) -> Iterator[str]:
        import torch

        from ligermodels.generation import generate_iter
        from ligermodels.text import StopStrings, StreamDecoder

        args, length = self.args, self.args.max_new_tokens
        if length is None:
            left = self.model.config.max_position_embeddings - len(self.ids)
            length = min(args.usual_length, left) if left > 0 else args.usual_length
        decoder, stops = StreamDecoder(self.tokenizer, after=self.after), StopStrings(args.stop)
        self.times = [time.perf_counter()]
        for (token,) in generate_iter(
            self.model,
            torch.tensor([self.ids], dtype=torch.int64, device=self.model.device),
            max_new_tokens=length,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
            eos_token_id=self.stop_ids,
            **self.seen,
        ):
            self.times.append(time.perf_counter())
            text, stopped = stops.put(decoder.put(int(token)))
            if text:
                yield text
            if stopped:
                return
        text, stopped = stops.put(decoder.flush())
        yield text if stopped else text + stops.flush()

    def speed(self) -> str:
        if len(self.times) < 2:
            return "(no tokens)"
        count, first = len(self.times) - 1, self.times[1] - self.times[0]
        line = f"({len(self.ids)} prompt tokens, first token after {first:.2f} s"
        if count > 1:
            line += f", then {(count - 1) / (self.times[-1] - self.times[1]):.1f} tokens/s"
        return line + f"; {count} tokens)"
