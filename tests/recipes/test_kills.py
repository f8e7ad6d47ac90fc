"""`ligermodels train` killed at random moments: a run that is resumed ends with the bits of one that was left alone."""

import random
import signal
import time

import pytest

from tests.processes import Child
from tests.recipes.runs import all_metrics, metrics, reached, train, weights

STEPS = "--max-length 64 --accumulation 2 --max-steps 20 --learning-rate 3e-3 --warmup-steps 2 --resume".split()
RUNS = {
    "full": ("--eval-share", "0.2", "--save-steps", "2", "--eval-steps", "3"),
    "adapters": ("--lora-r", "4", "--merge", "--eval-share", "0.2", "--save-steps", "5", "--eval-steps", "2"),
}


@pytest.mark.parametrize("name, wanted", [
    ("full", 4), pytest.param("full", 20, marks=pytest.mark.slow), pytest.param("adapters", 8, marks=pytest.mark.slow),
])  # fmt: skip
def test_runs_killed_at_random_moments_end_with_the_same_bits(home, tmp_path, name, wanted):
    """So many kills, over as many runs as they take, at moments from the first line of Python to the last."""
    flags, seed = (*STEPS, *RUNS[name]), random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    rng, undisturbed = random.Random(seed), tmp_path / "undisturbed"
    Child(lambda: train(home, tmp_path / "warm", *flags)).wait()  # what is imported late, and the files that are read
    start = time.monotonic()
    assert train(home, undisturbed, *flags) == 0
    whole = time.monotonic() - start
    kills, runs = [], 0
    while len(kills) < wanted:
        runs += 1
        out, ended = tmp_path / str(runs), False
        while not ended:
            child, after = Child(lambda out=out: train(home, out, *flags)), rng.uniform(0, 0.7 * whole)
            time.sleep(after)
            child.signal(signal.SIGKILL)
            status = child.wait()
            ended = status == 0
            assert ended or status == -signal.SIGKILL
            kills += [] if ended else [(runs, max(metrics(out), default=0) if (out / "metrics.jsonl").is_file() else 0)]
            if len(kills) == wanted:
                break
        assert train(home, out, *flags) == 0
        assert weights(out) == weights(undisturbed)
        assert all_metrics(out) == all_metrics(undisturbed)
        ours, theirs = (sorted(path.name for path in folder.iterdir()) for folder in (out, undisturbed))
        assert ours == theirs  # nothing half-written is left
    print(f"{name}: {len(kills)} kills in {runs} runs, after (run, step) {kills}")


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_same_folder_is_refused(home, resume, capfd):
    flags = (*STEPS, "--max-steps", "1000", "--save-steps", "0")
    out = home / f"twice-{resume}"
    child = Child(lambda: train(home, out, *flags))
    reached(out, 2, child)
    assert train(home, out, *(flags if resume else [flag for flag in flags if flag != "--resume"])) == 3
    said = capfd.readouterr().err
    assert ("another process is training in --output-dir" if resume else "has a run already; pass --resume") in said
    child.signal(signal.SIGINT)
    assert child.wait() == 0  # of the fork; the run itself ended by the signal, and saved
    assert "which is saved" in capfd.readouterr().err
    assert train(home, out, *flags, "--max-steps", str(max(metrics(out)))) == 0
