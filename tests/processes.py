"""Processes of tests: forks to kill and to interrupt, which never run on as the test, and fresh ones that meet."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from tqdm import tqdm

SIGNALS = {signal.SIGINT, signal.SIGTERM}
INTERRUPTED = 3
SECONDS = 120  # far more than any of them takes: a child that hangs fails its test, and not the whole run


class Child:
    """A fork of this process that does `work` and ends: with 0, with 3 if it was interrupted, else with 1.

    A signal that comes before the child is ready waits until it is. It must not act earlier: the KeyboardInterrupt
    would rise through the test and the runner above it, whose copy in the child then writes into the parent's pipes.
    """

    def __init__(self, work: Callable[[], object]):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _end_with(work, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit status, negative for the signal that it died of."""
        end = time.monotonic() + seconds
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"a child was still running after {seconds} s")
            time.sleep(0.001)
        return os.waitstatus_to_exitcode(ended[1])


def _end_with(work: Callable[[], object], mask: set[signal.Signals]) -> None:
    status = 1
    gc.freeze()  # the parent's garbage: a process group waits in its destructor for threads that a fork does not have
    try:
        torch.set_num_threads(1)  # the parent's pool of threads is not in a fork, and waiting for it would be forever
        tqdm.set_lock(threading.RLock())  # its own is shared with the parent, who would wait for it once we are killed
        forkserver._forkserver.__init__()  # the parent's, if it has one, is no child of ours
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[1])}


def python(*arguments: object) -> str:
    """What a fresh Python prints with these arguments, on the CPU."""
    command = [str(part) for part in (sys.executable, *arguments)]
    done = subprocess.run(command, env=os.environ | CPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def torchrun(*arguments: object) -> dict[int, float]:
    """{step: loss} that a script of examples/ prints on two processes."""
    return losses_in(python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *arguments))


def losses_in(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", output, re.MULTILINE)}


def spawn(work: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 2) -> None:
    """Runs work(rank, *args) in fresh processes; raises where one of them does."""
    mp.spawn(_work_and_leave, args=(work, args), nprocs=nprocs)


def _work_and_leave(rank: int, work: Callable[..., object], args: tuple[Any, ...]) -> None:
    work(rank, *args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may abort a process that ends as others do, after all is done
