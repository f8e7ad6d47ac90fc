"""How the commands print."""

import json
import os
import sys
import time
from pathlib import Path


def say(text: str, end: str = "\n") -> None:
    """Prints to stderr, at once."""
    print(text, end=end, file=sys.stderr, flush=True)


def say_error(text: str) -> None:
    """Prints an error. Under torchrun only rank 0 does.

    torchrun ends with some thirty lines of its own about the process that failed first. They show the text of the file
    that is written here; the other ranks wait, so that it is rank 0's where all have the same error.
    """
    file, is_main = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("RANK") == "0"
    if file is None or is_main:
        say(text)
    if file is not None:
        if not is_main:
            time.sleep(2)
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}  # as torch's ErrorHandler writes it
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def readable_size(count: float) -> str:
    """A number of bytes as text, such as 2.89 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
