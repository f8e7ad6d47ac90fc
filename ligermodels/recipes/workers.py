"""Processes that work ahead: what a function makes of items, in their order.

They are no forks of the process that uses them, whose threads (of tokenizers, torch, CUDA) do not live on in a fork.
They are forks of a server that multiprocessing starts afresh (forkserver; "spawn" on Windows). It inherits no open
file, has a single thread, and imports what is needed once. Measured on two cores with torch 2.13: the server starts in
1.1 s, and each process after it in 5 ms; by "spawn" each process takes 1.2 s of a core.

As everywhere in multiprocessing, what is sent must be picklable, and the processes import the script that is running:
a script must start its work under `if __name__ == "__main__":`. The command `ligermodels` does.

A process ends when its pipe is closed, so that it outlives nobody, however the one that uses it ends.
"""

import collections
import contextlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch

from ligermodels.errors import InputError, TrainingError

_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_ENDING = {signal.SIGINT, signal.SIGTERM}
_AHEAD = 2
"""Items that each process is given ahead."""


class Workers(Iterator[Any]):
    """work(item) of each item, in the order of the items, which are asked for as they are needed.

    modules: those that `work` needs, for the server to import. Raises InputError where `work` cannot be pickled,
    TrainingError where a process dies, also by an error in `work`.
    """

    def __init__(
        self, work: Callable[[Any], Any], items: Iterator[Any], number: int, modules: Sequence[str] = ()
    ) -> None:
        try:
            pickled = pickle.dumps(work)
        except Exception as error:  # many kinds, of what is in it
            raise InputError(
                f"processes need rows and encoder that can be pickled: {type(error).__name__}: {error}. Next step: "
                "define them at the top of a module, or workers=0"
            ) from error
        self._items = items
        self._running: list[tuple[Any, Any]] = []  # (process, connection)
        self._waiting: collections.deque[tuple[Any, Any]] = collections.deque()  # in the order of what they will send
        self.close = Finalize(self, _end, (self._running,), exitpriority=0)
        context: Any = multiprocessing.get_context(_METHOD)
        if _METHOD == "forkserver":
            context.set_forkserver_preload([__name__, *modules])
        with _signals_blocked():
            for _ in range(number):
                own, other = context.Pipe()
                process = context.Process(target=_serve, args=(other,), daemon=True)
                process.start()
                other.close()
                self._running.append((process, own))
        for running in self._running:
            self._send(running, pickled)
        for running in self._running * _AHEAD:
            self._give(running)

    def __next__(self) -> Any:
        if not self._waiting:
            raise StopIteration
        running = self._waiting.popleft()
        try:
            found = running[1].recv()
        except (EOFError, OSError):
            raise self._died(running[0]) from None
        self._give(running)
        return found

    def _give(self, running: tuple[Any, Any]) -> None:
        if (item := next(self._items, None)) is not None:
            self._send(running, pickle.dumps(item))
            self._waiting.append(running)

    def _send(self, running: tuple[Any, Any], data: bytes) -> None:
        try:
            running[1].send_bytes(data)
        except OSError:
            raise self._died(running[0]) from None

    def _died(self, process: Any) -> TrainingError:
        process.join(5)
        code = process.exitcode
        self.close()
        if code is not None and code < 0:
            how = f"by signal {signal.Signals(-code).name}"
            likely = "the system killed it, since memory ran out" if code == -signal.SIGKILL else "a crash in a library"
        else:
            how = f"with exit code {code}"
            likely = "an error that it has told above; a script trains under `if __name__ == '__main__':`"
        return TrainingError(
            f"process {process.pid}, which encodes rows, ended {how}.\n  Likely: {likely}.\n"
            "  Next: --resume goes on from the newest checkpoint, if there is one."
        )


def _end(running: list[tuple[Any, Any]]) -> None:
    for process, connection in running:
        connection.close()
        process.kill()  # it holds nothing that could be lost
    for process, _ in running:
        process.join()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """For what is started meanwhile: Ctrl-C and a scheduler's SIGTERM come to all processes, and one decides."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(connection: Any) -> None:
    """In a process: works until the pipe is closed."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    torch.set_num_threads(1)
    work: Callable[[Any], Any] | None = None
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        if work is None:
            work = pickle.loads(data)
            continue
        found = work(pickle.loads(data))
        try:
            connection.send(found)
        except OSError:
            return
