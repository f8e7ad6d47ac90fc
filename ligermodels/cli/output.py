"""How the commands print."""

import sys


def say(text: str, end: str = "\n") -> None:
    """Prints to stderr, at once."""
    print(text, end=end, file=sys.stderr, flush=True)


def readable_size(count: float) -> str:
    """A number of bytes as text, such as 2.89 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
