"""Fixtures of the whole suite: the device under test, fixed seeds, and memory that is never zero by luck."""

import functools
import json
import os
import shutil
import sys
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
settings.register_profile("of any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("of any speed")
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (gpus := torch.cuda.device_count()) > 1:
    # Processes share the GPUs of the machine, or those that are visible: each counts all of them, from another one on.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    first = int(worker.removeprefix("gw")) % gpus
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first:] + visible[:first])
if worker:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process has as many as there are cores
torch.set_num_threads(1)  # a second one waits for matrices this small, ten times as long if it has no core of its own


def pytest_addoption(parser):
    parser.addoption(
        "--record", metavar="FILE",
        help="write what comes out to FILE; the tests that FILE names as slow, if it is there, are run first",
    )  # fmt: skip
    parser.addoption(
        "--all-packages", action="store_true", help="fail where a test is skipped because its package is not installed"
    )


def pytest_configure(config):
    if config.option.record and not hasattr(config, "workerinput"):
        from tests.record import Record

        config.pluginmanager.register(Record(config.option.record))


def _reasons_of_skips(config) -> Counter[str]:
    """{why: number of tests or files}; empty in a process that runs tests for another."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", ()) if reporter else ()
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def _lacks_packages(config) -> bool:
    return config.option.all_packages and any("could not import" in reason for reason in _reasons_of_skips(config))


def pytest_sessionfinish(session):
    if session.exitstatus == pytest.ExitCode.OK and _lacks_packages(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for reason, number in _reasons_of_skips(config).most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")
    if _lacks_packages(config):
        terminalreporter.write_line("FAILED: --all-packages, and some that tests need are not installed", red=True)


def pytest_collection_modifyitems(config, items):
    """`-m gpu` selects every test that takes the `device` fixture, beside those marked gpu by hand.

    The latter need real hardware and are skipped without it; the former run interpreted on the CPU.
    """
    if config.option.record:
        from tests.record import slowest_first

        slowest_first(items, config.option.record, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _poisoned(make):
    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        out = make(*args, **kwargs)
        if out.device.type == "meta" or out.numel() == 0:
            return out
        if out.is_floating_point():
            return out.fill_(float("nan"))
        return out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).max)

    return wrapper


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN (the largest value, for integers): an element that is never written shows."""
    with torch.device("meta"):  # on its first use, this notes which functions make tensors: the unpatched ones
        torch.empty(0)
    for owner, name in [
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
        (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture
def without_triton(monkeypatch):
    """Ops run what they run where Triton is not installed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ligermodels.kernels") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda x: False)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A function: (config, norm=) -> a folder with a checkpoint by transformers, a copy that the test may change."""
    from tests.arch.suite import write_checkpoint

    made = {}

    def copy(config, **options):
        key = json.dumps([config, options])
        if key not in made:
            made[key] = write_checkpoint(config, tmp_path_factory.mktemp("made") / "hf", **options)
        return shutil.copytree(made[key], tmp_path_factory.mktemp("copy") / "hf")

    return copy
