"""What the fuzzers share: how many examples and how long, and their command line."""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, settings


class Fuzzer(Protocol):
    counts: Mapping[str, Counter]
    """Kind of input -> how many ended how."""

    def targets(self, count: int) -> list[Callable[[], None]]:
        """Calls that try `count` inputs together; an uncaught error ends them."""
        ...


def bounded(examples: int, **options: Any) -> settings:
    return settings(
        max_examples=examples,
        deadline=60_000,  # milliseconds on the wall; an example takes ten
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        **options,
    )


def run(make: Callable[[Path], Fuzzer], description: str, *, count: int) -> None:
    """Runs all targets of make(an empty folder), and prints how the inputs ended."""
    parser = argparse.ArgumentParser(description=f"{description}; an uncaught error ends the run.")
    parser.add_argument("--count", type=int, default=count)
    root = Path(tempfile.mkdtemp())
    try:
        fuzz = make(root)
        for target in fuzz.targets(parser.parse_args().count):
            target()
        for kind, counts in fuzz.counts.items():
            print(f"{kind}: {counts.total()} ({', '.join(f'{name} {n}' for name, n in counts.most_common())})")
    finally:
        shutil.rmtree(root)
