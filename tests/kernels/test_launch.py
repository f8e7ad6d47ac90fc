"""`launch` runs the compiled variant that Triton would run, and leaves unusual kernels to Triton."""

import functools
import random
import sys
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from ligermodels.kernels import _launch
from ligermodels.kernels._launch import launch


def mix(out_ptr, x_ptr, y_ptr, n, stride, scale, NAME: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    pass


def plain(a_ptr, n, BLOCK: tl.constexpr = 16):
    pass


def annotated(a_ptr, n: tl.int64, BLOCK: tl.constexpr):
    pass


def described(a_ptr, desc, n, BLOCK: tl.constexpr):
    pass


class Fake:
    """A kernel whose compiled variants only note, with each launch, the cache key of Triton that they belong to."""

    def __init__(self, monkeypatch, fn, scratch=0, **options):
        self.kernel, self.scratch = JITFunction(fn, **options), scratch
        self.compiled, self.direct = [], []
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, self.backend)
        self.kernel.device_caches[0] = self.kernel.device_caches[1] = {}, {}, None, self.backend, binder
        self.kernel.run = self.run
        self.device = 0
        monkeypatch.setattr(_launch, "_DIRECT", True)
        monkeypatch.setattr(_launch, "_KERNELS", {})
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)

    def key(self, *args, **options):
        _, specialization, rest = self.kernel.device_caches[0][4](*args, **options)
        return self.device, compute_cache_key({}, specialization, rest)

    def run(self, *args, grid, warmup, **options):
        key = self.key(*args, **options)
        self.compiled.append(key)
        launcher = object.__new__(CudaLauncher)
        launcher.global_scratch_size, launcher.profile_scratch_size = self.scratch, 0
        launcher.launch_cooperative_grid = launcher.launch_pdl = False
        launcher.arg_annotations = launcher.kernel_signature = None
        launcher.launch = functools.partial(self.launch, key)  # no function of Python, as the C launcher is none
        return SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")

    def launch(self, key, *args):
        self.direct.append((key, args))

    def launched(self, *args, **options):
        """The key of the variant that one launch ran, and what the C launcher was called with, if it was."""
        launch(self.kernel, (5,), *args, **options)
        if self.compiled:
            return self.compiled.pop(), None
        return self.direct.pop()


def variations(rng):
    """Arguments, by name, and near misses of each: what it may be in another call."""

    def tensor():
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        return torch.zeros(64, dtype=dtype)[rng.choice([0, 0, 1, 4, 8]) :]

    return {
        "out_ptr": tensor,
        "x_ptr": tensor,
        "y_ptr": lambda: rng.choice([None, tensor()]),
        "n": lambda: rng.choice([0, 1, 16, 17, 2**31 - 1, 2**31, -(2**31) - 1]),
        "stride": lambda: rng.choice([0, 1, 2, 16, 17, 48, -16, 2**31, 2**31 + 5, 2**40, True]),
        "scale": lambda: rng.choice([1, 1.0, 2.0, 0.5, True, False, 16]),
        "NAME": lambda: rng.choice(["double", "same"]),
        "BLOCK": lambda: rng.choice([16, 32]),
        "SHIFT": lambda: rng.choice([0, 1]),
        "num_warps": lambda: rng.choice([1, 4]),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"do_not_specialize": ["n", "stride"]}, {"do_not_specialize": ["scale"]}])
def test_takes_the_variant_that_triton_takes(monkeypatch, seed, options):
    """The same call twice, then with one argument changed, then as it was: each against Triton's own key."""
    fake, rng, direct = Fake(monkeypatch, mix, **options), random.Random(seed), 0
    vary = variations(rng)
    for _ in range(200):
        first = {name: make() for name, make in vary.items()}
        changed = [first | {name: vary[name]()} for name in rng.sample(list(vary), 3)]
        by_position = rng.choice([6, 7, 9])
        for call in (first, first, *changed, first):
            fake.device = rng.choice([0, 0, 0, 1])
            args, named = list(call.values())[:by_position], dict(list(call.items())[by_position:])
            key, sent = fake.launched(*args, **named)
            assert key == fake.key(*args, **named)
            if sent is not None:
                direct += 1
                assert sent[:5] == (5, 1, 1, 70 + fake.device, "function")
                assert addresses(sent[-1] if _launch._VERSION > (3, 6) else sent[-9:]) == addresses(call.values())[:9]
    assert direct > 300  # or Triton was compared with itself


def addresses(values):
    return [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.parametrize("what", ["annotated", "scratch", "a grid that is a function"])
def test_leaves_kernels_and_grids_to_triton(monkeypatch, what):
    fake = Fake(monkeypatch, annotated if what == "annotated" else plain, 16 * (what == "scratch"))
    for _ in range(3):
        launch(fake.kernel, (lambda meta: (5,)) if "function" in what else (5,), torch.zeros(16), 7, 16)
    assert len(fake.compiled) == 3 and not fake.direct


def test_descriptors_reach_the_launcher_that_encodes_them(monkeypatch):
    fake, first, second = Fake(monkeypatch, described), torch.zeros(16, 8).half(), torch.ones(32, 8).half()
    for matrix, rows in ((first, 16), (second, 16), (first, 8)):
        descriptor = TensorDescriptor.from_tensor(matrix, [rows, 8])
        _, args = fake.launched(first, descriptor, 7, 16)
        if matrix is second:  # the variant of the first: its blocks have the same shape
            assert any(a is descriptor for a in [*args[:-1], *args[-1]])
        else:
            assert args is None


def test_says_why_launches_go_through_triton(monkeypatch):
    def reason(**changes):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(_launch, name, value)
            return _launch.why_through_triton() or ""

    fake = Fake(monkeypatch, plain)
    assert "watches" in reason()
    for scratch, watched in ((16, True), (0, False)):
        fake.scratch = scratch
        launch(fake.kernel, (5,), torch.zeros(16), scratch, 16)
        assert ("watches" in reason()) == watched
    assert "interpreted" in reason(_DIRECT=False, INTERPRET=True) and "CUDA" in reason(_DIRECT=False, INTERPRET=False)
    assert "none of 3.6 to 3.9" in reason(_KNOWN=False)


def test_kernels_call_functions_by_their_own_names():
    """torch.compile writes a kernel's functions into a module of its own, by these names."""
    modules = [sys.modules[name] for name in sys.modules if name.startswith("ligermodels.kernels.")]
    jitted = [(m.__name__, name, f.__name__) for m in modules for name, f in vars(m).items() if hasattr(f, "arg_names")]
    assert len(jitted) > 50 and not [found for found in jitted if found[1] != found[2]]
