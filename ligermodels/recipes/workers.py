"""Work that is done ahead of its use, in a thread or in worker processes.

Worker processes are no forks of the run, whose threads (of tokenizers, torch, CUDA) do not survive in a fork, but of a
server that multiprocessing starts (forkserver; "spawn" on Windows): as everywhere in multiprocessing, what is sent must
be picklable, and a script must start its work under `if __name__ == "__main__":`. torch's DataLoader is not used: a run
waits forever for a process of its that is killed while it writes (torch 2.13, seen in a test). A ProcessPoolExecutor
sees that.
"""

import collections
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from ligermodels.errors import TrainingError

_work: Callable[[Any], Any]
"""The function, in a worker process."""


def map_ahead(work: Callable[[Any], Any], items: Iterator[Any], ahead: int, processes: int) -> Generator[Any]:
    """work(item) for each item, in their order, of which `ahead` are computed before they are asked for.

    processes: worker processes, to which `work` is sent; 0: a thread. Raises the errors of `work`, and TrainingError if
    a process dies.
    """
    executor, call = (_processes(work, processes), _apply) if processes else (ThreadPoolExecutor(1, "rows"), work)
    results = collections.deque[Any]()
    try:
        for item in items:
            results.append(executor.submit(call, item))
            if len(results) > ahead:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    except BrokenProcessPool as error:
        raise TrainingError(
            "a process that encodes rows has ended.\n  Likely: the system killed it, since memory ran out, or a "
            "library crashed, which it has printed above. A script trains under `if __name__ == '__main__':`.\n"
            "  Next: --resume continues from the newest checkpoint, if there is one."
        ) from error
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # the garbage collector may call this in the thread itself


def _processes(work: Callable[[Any], Any], number: int) -> Executor:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["ligermodels.recipes.base", "tokenizers"])  # imported once, for all
    return ProcessPoolExecutor(number, context, _begin, (work,))


def _begin(work: Callable[[Any], Any]) -> None:
    """In a worker process, before the first item."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all processes, and the run finishes its step
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    torch.set_num_threads(1)


def _apply(item: Any) -> Any:
    return _work(item)


def _end_with_the_run() -> None:
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)
