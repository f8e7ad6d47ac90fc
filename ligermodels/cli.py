"""The command line. What was asked for goes to stdout, everything about it to stderr.

Exit status: 0 done, 1 `doctor` found something to fix, `demo` failed, or `convert` or `verify` found a mismatch,
2 wrong usage, 3 an error of ligermodels, printed as one message without a traceback, 130 interrupted. `convert` and
`verify` tell more apart: 2 options that do not fit together too, 3 a source that cannot be used, 4 no space left,
5 the Hub, the network or the file system refused.
Each command imports what it needs, so that --help does not wait for torch.
"""

import argparse
import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels import __version__
from ligermodels.errors import HubError, InputError, LigermodelsError, TokenizerError

if TYPE_CHECKING:
    from ligermodels.arch import CausalLM
    from ligermodels.conversion import Inspection, Report
    from ligermodels.text import Tokenizer


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows '?', not a traceback
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        try:
            status = args.run(args)
            sys.stdout.flush()
            return status
        except LigermodelsError as error:
            _say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
            return args.status(error) if "status" in args else 3
        except KeyboardInterrupt as stop:
            _say("\n".join(["", *getattr(stop, "__notes__", ())]))
            return 130
        except BrokenPipeError:  # the reader of our stdout has gone, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


class _Command(argparse.ArgumentParser):
    """Complains of unknown arguments itself, with its own usage and not that of the whole program."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ligermodels",
        description="Language models built from fused Triton layers.",
        epilog="ligermodels COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"ligermodels {__version__}")
    kind: type[argparse.ArgumentParser] = _Command
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=kind)

    demo = commands.add_parser("demo", help="train, save, reload and run a small model: no GPU, no network")
    demo.add_argument("--seconds", type=float, default=20.0, help="time for training (default 20)")
    demo.add_argument("--keep", metavar="DIR", help="folder for the trained checkpoint (default: a temporary one)")
    demo.set_defaults(run=_demo)

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
    chat.add_argument("--max-new-tokens", type=int, help="per answer; default 1024, or what the context leaves")
    chat.set_defaults(run=_chat, usual_length=1024)

    _add_conversion(commands)

    doctor = commands.add_parser("doctor", help="what this machine offers, and how to fix what is missing")
    doctor.set_defaults(run=_doctor)
    return parser


_EPILOG = """\
layouts, found out by the files of the folder:
  Hugging Face, native  model.safetensors, or model-*.safetensors and their index
  pickled               pytorch_model*.bin, with --allow-pickle
  Meta                  consolidated.NN.pth and params.json, with --allow-pickle
  Mistral               consolidated*.safetensors and params.json
  distributed           .metadata and *.distcp; if there is no config.json, with --config
  LoRA adapter          adapter_config.json: for inspect, and for convert BASE DST --adapter DIR

exit status:
  0    done
  1    the weights do not match: their model, or each other
  2    wrong usage
  3    a source that cannot be used
  4    no space left
  5    the Hub, the network or the file system refused
  130  interrupted"""


def _add_conversion(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--allow-pickle", action="store_true", help="read pickled weights too, as plain tensors only")
    shared.add_argument("--json", action="store_true", help="print the report as JSON")
    shared.add_argument(
        "--config", metavar="DIR", help="folder of config.json and tokenizer, for a distributed checkpoint without them"
    )
    shared.add_argument(
        "--rope-factor",
        metavar="X",
        type=float,
        help="of Meta's use_scaled_rope, for a model of a size that Meta has not published; as 8 in Llama 3.1",
    )

    inspect = commands.add_parser(
        "inspect",
        parents=[shared],
        help="what a checkpoint is, and what reads it, from its headers alone",
        description="Prints parameters by part, dtypes, files, what the configuration says, and the call or command\n"
        "that reads SRC. Weights stay unread.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    inspect.add_argument("src", metavar="SRC", help="folder, or repository on the Hub, whose weights are not fetched")
    inspect.add_argument("--revision", help="branch, tag or commit of SRC")
    inspect.add_argument("--local-files-only", action="store_true", help="use what is cached, never the network")
    inspect.set_defaults(run=_inspect, status=_conversion_status)

    convert = commands.add_parser(
        "convert",
        parents=[shared],
        help="another layout, dtype or division into files",
        description="Converts the checkpoint SRC. DST appears when it is complete; conversion.json in it (beside it,\n"
        "for a GGUF file) says from what it was made. Memory holds one tensor of the result and what\n"
        "it is made from.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    convert.add_argument("src", metavar="SRC", help="folder, or repository on the Hub; its layout is found out")
    convert.add_argument(
        "dst", metavar="DST", nargs="?", help="folder to write, or file with --to gguf; may be left out with --dry-run"
    )
    convert.add_argument(
        "--to",
        choices=_LAYOUTS,
        default="hf",
        help="layout to write: Hugging Face's, the packed one of ligermodels, Meta's (Llamas), a torch distributed "
        "checkpoint, or one GGUF file for llama.cpp (default: hf)",
    )
    convert.add_argument(
        "--dtype", choices=["keep", "bf16", "fp16", "fp32"], default="keep", help="cast to this (default: keep)"
    )
    size = convert.add_mutually_exclusive_group()
    size.add_argument("--max-shard-size", metavar="SIZE", help="per file, as 5GB or 500MiB (default 5GB)")
    size.add_argument("--like", action="store_true", help="divide into files as SRC is divided")
    convert.add_argument(
        "--ranks", metavar="N", type=int, default=1, help="with --to meta: number of files (default 1)"
    )
    convert.add_argument(
        "--embedding-axis",
        type=int,
        choices=[0, 1],
        help="with --to meta and --ranks: cut the embedding by rows, 0, as in Llama 3, or by columns, 1, as in Llama 2 "
        "(default: by rope_theta)",
    )
    convert.add_argument("--adapter", metavar="DIR", help="LoRA adapter, as PEFT saves it, to merge into SRC")
    convert.add_argument("--revision", help="branch, tag or commit of SRC")
    convert.add_argument(
        "--verify",
        choices=["none", "keys", "bytes", "logits"],
        default="none",
        help="compare the result with SRC before it takes its place: names, shapes and dtypes; every bit too; what "
        "both say in fp32 too, with the whole model in memory, not for gguf (default: none)",
    )
    convert.add_argument("--dry-run", action="store_true", help="check SRC and plan from headers; write nothing")
    convert.add_argument("--overwrite", action="store_true", help="save over what is in DST")
    convert.add_argument("--resume", action="store_true", help="go on from an interrupted conversion into DST")
    convert.set_defaults(run=_convert, status=_conversion_status)

    verify = commands.add_parser(
        "verify",
        parents=[shared],
        help="whether two checkpoints, of any layouts, are the same model",
        description="Compares names, shapes, dtypes and bits of A and B, and what they say: their logits and\n"
        "likeliest tokens on fixed prompts, in fp32 on the CPU. Logits that differ by up to 5e-5 of their size\n"
        "do so by rounding, 0 is usual, and rows of q or k in a wrong order make it 2e-4 and more.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verify.add_argument("a", metavar="A", help="folder, or repository on the Hub")
    verify.add_argument("b", metavar="B", help="folder, or repository on the Hub")
    verify.add_argument(
        "--level",
        choices=["keys", "bytes", "logits"],
        default="logits",
        help="how far: headers only, every bit too, logits too with a whole model in memory (default: logits)",
    )
    verify.set_defaults(run=_verify, status=_conversion_status)


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _demo(args: argparse.Namespace) -> int:
    from ligermodels import demo

    return 0 if demo.run(seconds=args.seconds, keep=args.keep) else 1


# Text


def _generate(args: argparse.Namespace) -> int:
    if args.prompt is None:
        if sys.stdin.isatty():
            _say("error: nothing to continue: give --prompt TEXT, or pipe a text into stdin")
            return 2
        args.prompt = sys.stdin.read()
    tokenizer = _load_tokenizer(args)
    ids = tokenizer.encode(args.prompt)
    pieces = _Answer(_load_model(args), tokenizer, ids, tokenizer.eos_token_ids, args, after=ids)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    _say(pieces.speed())
    return 0


def _chat(args: argparse.Namespace) -> int:
    tokenizer = _load_tokenizer(args)
    start, lead = _opening(tokenizer, args)
    model, messages = _load_model(args), list(start)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):  # Windows does without
            import readline  # noqa: F401  # gives input() a history and line editing
        _say("/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.")
    while (line := _next_line(at_terminal)) is not None:
        line = line.strip()
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
            _say("(forgotten)")
        elif line.startswith("/"):
            _say(f"{line.split()[0]} is not a command; there are /reset and /exit")
        elif line:
            messages.append({"role": "user", "content": line if len(messages) > len(start) else lead + line})
            messages.append({"role": "assistant", "content": _answer(model, tokenizer, messages, args)})
    return 0


def _opening(tokenizer: "Tokenizer", args: argparse.Namespace) -> tuple[list[dict[str, str]], str]:
    """(messages before the user's first, text before that one): the one or the other is the system prompt.

    A template without a system role refuses it (Gemma) or leaves it out; then it begins the first message.
    Raises TokenizerError where there is nothing to talk to: no template, or one that cannot be used.
    """
    if not tokenizer.files.templates:
        raise TokenizerError(
            f"{args.model} has no chat template. Likely cause: a base model, which continues a text and gives no "
            f"answers. Next step: `ligermodels generate {args.model} --prompt TEXT`, or its instruct version."
        )
    hello = {"role": "user", "content": "Hello"}
    tokenizer.apply_chat_template([hello], add_generation_prompt=True, tokenize=False)
    if not args.system:
        return [], ""
    system, reason = {"role": "system", "content": args.system}, "the chat template leaves it out"
    try:
        text = tokenizer.apply_chat_template([system, hello], add_generation_prompt=True, tokenize=False)
        if args.system.strip() in str(text):
            return [system], ""
    except TokenizerError as error:
        reason = str(error)
    _say(f"note: no system prompt ({reason}); yours begins your first message instead")
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


def _answer(model: "CausalLM", tokenizer: "Tokenizer", messages: list[dict[str, str]], args: argparse.Namespace) -> str:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(str(prompt), add_special_tokens=False)
    pieces, text = _Answer(model, tokenizer, ids, tokenizer.chat_stop_ids, args), ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        _say(" (stopped)", end="")
    print()
    _say(pieces.speed())
    return text


def _load_tokenizer(args: argparse.Namespace) -> "Tokenizer":
    """Before the model, so that what is wrong with a prompt or a template shows before any weight is fetched."""
    from ligermodels.text import Tokenizer

    return Tokenizer.from_hub(args.model, revision=args.revision, local_files_only=args.local_files_only)


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

    after: the ids that the text goes on from; () where it begins anew, as an answer does.
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
    ):
        self.model, self.tokenizer, self.ids, self.stop_ids, self.args = model, tokenizer, ids, stop_ids, args
        self.after = after
        self.times: list[float] = []

    def __iter__(self) -> Iterator[str]:
        import torch

        from ligermodels.generate import generate_iter
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


# convert, verify

_LAYOUTS = ("hf", "native", "meta", "dcp", "gguf")


def _convert(args: argparse.Namespace) -> int:
    from ligermodels.conversion import Options, convert

    names = [field.name for field in dataclasses.fields(Options) if field.name in args]
    report = convert(args.src, args.dst, Options(**{name: getattr(args, name) for name in names}))
    _report(report, args, "would be written" if args.dry_run else "written")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ligermodels.conversion import verify

    reading = {name: getattr(args, name) for name in ("allow_pickle", "config", "rope_factor")}
    report = verify(args.a, args.b, level=args.level, **reading)
    _report(report, args, "compared")
    return 0 if report.ok else 1


def _report(report: "Report", args: argparse.Namespace, done: str) -> None:
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
        return
    details = "".join(f"{name.replace('_', ' ')}: {value}\n" for name, value in report.details.items())
    between = " and " if done == "compared" else " -> "
    names = report.source if report.destination is None else f"{report.source}{between}{report.destination}"
    print(f"{names}: {report.tensors} tensors, {_size(report.bytes)} {done}\n{details}", end="")
    shown = 20
    for line in report.mismatches[:shown]:
        print(f"MISMATCH {line}")
    if len(report.mismatches) > shown:
        print(f"... and {len(report.mismatches) - shown} more; --json lists them all")
    if done == "compared":
        print("the same" if report.ok else f"{len(report.mismatches)} mismatches")


def _conversion_status(error: LigermodelsError) -> int:
    from ligermodels.conversion import MismatchError

    if isinstance(error, MismatchError):
        return 1
    if isinstance(error, InputError):
        return 2
    if isinstance(error, HubError):
        return 4 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 5
    return 3


# inspect


def _inspect(args: argparse.Namespace) -> int:
    from ligermodels.conversion import inspect

    names = ("revision", "local_files_only", "allow_pickle", "config", "rope_factor")
    found = inspect(args.src, **{name: getattr(args, name) for name in names})
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        for name, value in {**_checkpoint_rows(found), **_model_rows(found)}.items():
            print(f"{name:16}{value}")
    if found.problem is not None:
        _say(f"error: {found.problem}")
    return 0 if found.ok else 1


def _checkpoint_rows(found: "Inspection") -> dict[str, str]:
    parts = {f"  {part}": f"{count:,} ({count / found.parameters:.1%})" for part, count in found.parts.items()}
    return {
        "checkpoint": found.folder,
        "layout": found.layout,
        "to use it": found.use,
        "parameters": f"{found.parameters:,}",
        **parts,
        "stored as": ", ".join(f"{name} ({count:,})" for name, count in found.dtypes.items()),
        "files": _files(found.files),
        "weights": f"{found.tensors} tensors" + f", {'' if found.ok else 'NOT '}as expected" * bool(found.model),
        "tokenizer": _tokenizer(found.tokenizer),
    }


def _model_rows(found: "Inspection") -> dict[str, str]:
    """What config.json, params.json or adapter_config.json say."""
    model = found.model
    if not model:
        words = {
            "base": "base model",
            "lora_alpha": "alpha",
            "target_modules": "targets",
            "modules_to_save": "replaces",
        }
        return {
            words.get(name, name): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in found.adapter.items()
        }
    rope = {key: f"[{len(value)}]" if isinstance(value, list) else value for key, value in model["rope"].items()}
    return {
        "architecture": f"{model['model_type']}, ligermodels.{model['architecture']}",
        "lm_head": "tied to the embedding" if model["tied"] else "its own weight",
        "loaded as": f"{model['dtype']} with dtype='auto'",
        "context": f"{model['context']:,} tokens",
        "rope": ", ".join(f"{key} {value}" for key, value in rope.items()),
        "layers": f"{model['layers']} of width {model['hidden_size']}, MLP {model['intermediate_size']}",
        "heads": f"{model['heads']} query and {model['kv_heads']} key-value heads of {model['head_dim']}",
        "vocabulary": f"{model['vocab_size']:,} ids",
    }


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def _files(files: dict[str, int]) -> str:
    total = _size(sum(files.values()))
    if len(files) == 1:
        return f"{next(iter(files))}, {total}"
    return f"{len(files)} shards of {_size(min(files.values()))} to {_size(max(files.values()))}, {total} in all"


def _tokenizer(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none here"
    if "problem" in found:
        return f"cannot be read: {found['problem']}"
    stops = ", ".join(map(str, found["stop_ids"])) or "none"
    templates = ", ".join(found["chat_templates"]) or "none"
    return f"{found['file']}, {found['vocab_size']:,} ids; stop ids {stops}; chat templates: {templates}"


# doctor


def _doctor(args: argparse.Namespace) -> int:
    """One line for each thing that matters, and a second with the fix where something is off."""
    problems = 0
    for name, value, fix in _findings():
        print(f"{'FIX ' if fix else 'ok  '} {name:14}{value}")
        if fix:
            problems += 1
            print(f"     {'':14}-> {fix}")
    return 1 if problems else 0


def _findings() -> Iterator[tuple[str, str, str | None]]:
    """(thing, state, how to fix it or None)."""
    import torch
    from huggingface_hub import constants, get_token

    from ligermodels.kernels import _triton

    yield "ligermodels", f"{__version__} at {Path(__file__).parent}", None
    yield "python", f"{platform.python_version()} on {platform.platform()}", None
    fix = None if _version(torch.__version__) >= (2, 11) else "pip install -U 'torch>=2.11'"
    yield "torch", torch.__version__, fix
    if not _triton.HAS_TRITON:
        fix = "pip install 'triton>=3.6'" if sys.platform == "linux" else None
        yield "triton", "not installed; every op runs as plain PyTorch", fix
    else:
        version = importlib.metadata.version("triton")
        yield "triton", version, None if _version(version) >= (3, 6) else "pip install -U 'triton>=3.6'"

    if torch.cuda.is_available():
        yield "CUDA runtime", f"{torch.version.cuda or torch.version.hip}", None
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            free = torch.cuda.mem_get_info(index)[0]
            capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
            room = f"{free / 2**30:.1f} of {gpu.total_memory / 2**30:.1f} GiB free"
            yield f"GPU {index}", f"{gpu.name}, {room}, capability {capability}", None
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        yield (
            "bfloat16",
            "in hardware" if native else "emulated and slow on this GPU: use dtype=torch.float16",
            None,
        )
        yield "kernels", *_try_kernel()
    else:
        built = torch.version.cuda or torch.version.hip
        if built and shutil.which("nvidia-smi"):
            fix = f"this torch needs a driver for {built}: update it, or check CUDA_VISIBLE_DEVICES"
        else:
            fix = (
                "install a torch build with CUDA: https://pytorch.org/get-started"
                if shutil.which("nvidia-smi")
                else None
            )
        yield "GPU", "none that torch can use", fix
        how = "set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter" if _triton.HAS_TRITON else ""
        yield "kernels", f"plain PyTorch on the CPU{'; ' * bool(how)}{how}", None

    found = get_token() is not None
    yield (
        "HF token",
        "present" if found else "none (needed for gated and private repositories: `hf auth login`)",
        None,
    )
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    fix = None if os.access(existing, os.W_OK) else "not writable: set HF_HOME to a folder that is"
    if fix is None and free < 10e9:
        fix = "little room for checkpoints: free some, or set HF_HOME to another disk"
    yield "cache", f"{cache}, {_size(free)} free", fix


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _try_kernel() -> tuple[str, str | None]:
    """Compiles and runs one Triton kernel on the GPU and compares it with PyTorch."""
    import torch

    from ligermodels.kernels.rms_norm import rms_norm, rms_norm_reference

    x = torch.randn(4, 100, device="cuda")
    try:
        close = torch.allclose(rms_norm(x), rms_norm_reference(x), atol=1e-5)
    except Exception as error:  # a compiler, driver or library that is missing shows in many ways
        reason = (str(error).strip().splitlines() or [""])[-1]
        fix = "Triton needs a C compiler (apt install gcc) and the torch release that it came with"
        return f"do not run: {type(error).__name__}: {reason}", fix
    return ("Triton, tried on this GPU", None) if close else ("WRONG RESULTS", "reinstall torch and triton together")


if __name__ == "__main__":
    sys.exit(main())
