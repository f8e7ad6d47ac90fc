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

    torchrun ends with some thirty lines about the process that failed first. They have the text too, read from a file,
    and are of rank 0 where all ranks have the same error, since the others wait.
    """
    file, is_main = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("RANK", "0") == "0"
    if file is None or is_main:
        say(text)
    if file is not None:
        Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))
        if not is_main:
            time.sleep(2)


def readable_size(count: float) -> str:
    """A number of bytes as text, such as 2.89 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
