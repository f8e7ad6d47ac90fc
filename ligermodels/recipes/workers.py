"""Worker processes that apply a function to items, ahead of their use and in the order of the items.

They are no forks of the run, whose threads (of tokenizers, torch, CUDA) do not survive in a fork, but of a server that
multiprocessing starts (forkserver; "spawn" on Windows): as everywhere in multiprocessing, what is sent must be
picklable, and a script must start its work under `if __name__ == "__main__":`. torch's DataLoader is not used: its
processes share a pipe, so that a run waits forever for one that is killed while it writes (torch 2.13, seen in a test),
and they live on after `kill -9` of the run. Here each process has a pipe of its own, whose end both sides notice.
"""

import collections
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch

from ligermodels.errors import InputError, LigermodelsError, TrainingError

_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_AHEAD = 2
"""Items that each process is given ahead."""


class Workers(Iterator[Any]):
    """work(item) for each item, in the order of the items.

    Raises the errors of ligermodels that `work` raises, InputError if it cannot be pickled, TrainingError if a process
    dies.
    """

    def __init__(self, work: Callable[[Any], Any], items: Iterator[Any], number: int) -> None:
        try:
            pickled = pickle.dumps(work)
        except Exception as error:  # many kinds, of what is in it
            raise InputError(
                f"rows and recipe must be picklable for worker processes: {type(error).__name__}: {error}. Next step: "
                "define them at the top of a module"
            ) from error
        self._items = items
        self._workers: list[tuple[Any, Any]] = []  # (process, connection)
        self._busy: collections.deque[tuple[Any, Any]] = collections.deque()  # in the order of their results
        self.close = Finalize(self, _end, (self._workers,), exitpriority=0)
        context: Any = multiprocessing.get_context(_METHOD)
        if _METHOD == "forkserver":
            context.set_forkserver_preload(["ligermodels.recipes.base", "tokenizers"])  # imported once, for all
        # Ctrl-C and a scheduler's SIGTERM come to all processes, and the run decides: here they are blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if hasattr(signal, "pthread_sigmask") else None
        try:
            for _ in range(number):
                own, other = context.Pipe()
                process = context.Process(target=_serve, args=(other,), daemon=True)
                process.start()
                other.close()
                self._workers.append((process, own))
        finally:
            if mask is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for worker in self._workers:
            self._send(worker, pickled)
        for worker in self._workers * _AHEAD:
            self._give(worker)

    def __next__(self) -> Any:
        if not self._busy:
            raise StopIteration
        worker = process, connection = self._busy.popleft()
        try:
            result = connection.recv()
        except (EOFError, OSError):
            raise self._death(process) from None
        if isinstance(result, LigermodelsError):
            raise result
        self._give(worker)
        return result

    def _give(self, worker: tuple[Any, Any]) -> None:
        if (item := next(self._items, None)) is not None:
            self._send(worker, pickle.dumps(item))
            self._busy.append(worker)

    def _send(self, worker: tuple[Any, Any], data: bytes) -> None:
        process, connection = worker
        try:
            connection.send_bytes(data)
        except OSError:
            raise self._death(process) from None

    def _death(self, process: Any) -> TrainingError:
        process.join(5)
        code = process.exitcode
        self.close()
        if code is not None and code < 0:
            how = f"by signal {signal.Signals(-code).name}"
            likely = "the system killed it, since memory ran out" if code == -signal.SIGKILL else "a crash in a library"
        else:
            how = f"with exit code {code}"
            likely = "an error that it has printed above; a script trains under `if __name__ == '__main__':`"
        return TrainingError(
            f"process {process.pid}, which encodes rows, ended {how}.\n  Likely: {likely}.\n"
            "  Next: --resume continues from the newest checkpoint, if there is one."
        )


def _end(workers: list[tuple[Any, Any]]) -> None:
    for process, connection in workers:
        connection.close()
        process.kill()  # it has nothing that could be lost
    for process, _ in workers:
        process.join()


def _serve(connection: Any) -> None:
    """In a process: works until the pipe is closed."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    torch.set_num_threads(1)
    try:
        work = connection.recv()
        while True:
            item = connection.recv()
            try:
                result = work(item)
            except LigermodelsError as error:
                result = error
            connection.send(result)
    except (EOFError, OSError):
        return
