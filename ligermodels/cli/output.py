"""How the commands print."""

import json
import os
import sys
import time
from pathlib import Path


def say(text: str, end: str = "\n") -> None:
    """Prints to stderr, at once: in one write, so that the lines of two ranks do not mix."""
    print(f"{text}{end}", end="", file=sys.stderr, flush=True)


def say_error(text: str) -> None:
    """Prints an error; where all ranks of torchrun have one, that of rank 0 alone.

    torchrun ends the others as soon as one has failed, and writes some thirty lines of its own, which end with the text
    in the file of the first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None and os.environ.get("RANK") != "0":
        time.sleep(2)  # rank 0 fails first, if it fails
    say(text)
    if file is not None:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}  # as torch's ErrorHandler writes it
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
