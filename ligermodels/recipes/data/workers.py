"""Work that is done before its result is needed, in a thread or in worker processes.

multiprocessing's forkserver starts the worker processes. They cannot be forks of the run, since its threads (of
tokenizers, torch, CUDA) do not survive a fork. As everywhere in multiprocessing, all that is sent must be picklable,
and a script must start its work under `if __name__ == "__main__":`. Each process has its own pipe, so that both sides
notice when the other ends. In a DataLoader or a ProcessPoolExecutor the processes share a pipe, and the run waits
forever for a process that is killed while it writes (seen in tests with torch 2.13 and Python 3.11).
"""

import collections
import contextlib
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ligermodels.errors import LigermodelsError, TrainingError

Work = Callable[[Any], Any]


def map_ahead(work: Work, items: Iterator[Any], ahead: int, processes: int) -> Generator[Any]:
    """Yields work(item) for each item, in order, and computes up to `ahead` results before they are asked for.

    processes: number of worker processes, to which `work` is sent; 0: a thread. Raises the errors of `work`, and
    TrainingError if a process dies.
    """
    free: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for worker in [_in_process(work) for _ in range(processes)] or [work]:
        free.put(worker)

    def call(item: Any) -> Any:
        worker = free.get()
        try:
            return worker(item)
        finally:
            free.put(worker)

    executor = ThreadPoolExecutor(max(1, processes), "rows")
    results = collections.deque[Any]()
    try:
        for item in items:
            results.append(executor.submit(call, item))
            if len(results) > ahead:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # the garbage collector may call this in the thread itself


def _in_process(work: Work) -> Work:
    """`work` in a process of its own, which ends with this function."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ligermodels.recipes.base", "tokenizers"])  # imported once, for all processes
    pipe, other = context.Pipe()
    process = context.Process(target=_serve, args=(work, other), daemon=True)
    process.start()
    other.close()

    def call(item: Any) -> Any:
        try:
            pipe.send(item)
            result = pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            raise TrainingError(
                f"process {process.pid}, which encodes rows, has ended with exit code {process.exitcode}.\n"
                "  Likely: -9: the system killed it, since memory ran out; another negative one: a library crashed; 1: "
                "an error that it has printed above (a script trains under `if __name__ == '__main__':`).\n"
                "  Next: --resume continues from the newest checkpoint, if there is one."
            ) from None
        if isinstance(result, LigermodelsError):
            raise result
        return result

    return call


def _serve(work: Work, pipe: Any) -> None:
    """In a process: works until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all processes, and the run finishes its step
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            try:
                pipe.send(work(item))
            except LigermodelsError as error:
                pipe.send(error)
