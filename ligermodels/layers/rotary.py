"""Rotary position embeddings: tables of cos and sin for the rope types of the released checkpoints.

Frequency i of R/2 rotates dims i and i + R/2 of a head by position * f_i, where f_i starts as theta ** (-2i/R):

| rope_type    | f_i becomes                                                       | cos, sin times         |
|--------------|-------------------------------------------------------------------|------------------------|
| default      | f_i                                                               | 1                      |
| linear       | f_i / factor                                                      | 1                      |
| dynamic      | f_i with a theta that grows past max_position_embeddings          | 1                      |
| llama3       | f_i / factor for long wavelengths, f_i for short, blended between | 1                      |
| yarn         | f_i to f_i / factor along a ramp over i                           | 1 + 0.1 ln factor      |
| longrope     | f_i / long_factor_i if a call exceeds length L, else short_factor | (1 + log_L factor)^0.5 |
| proportional | f_i of the first partial_rotary_factor R/2, 0 of the others       | 1                      |

The arithmetic is fp32 in transformers' order, so that the tables agree to the bit: at position 10000 the last bit of a
frequency is worth 1e-3 of an angle.

A token of an image has three positions (time, row, column). `sections` says how many frequencies use each position:
in this order in Qwen2-VL, interleaved from Qwen3-VL on. `VisionRotary` has two positions, row and column.

Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; Peng et al. 2023, "YaRN",
https://arxiv.org/abs/2309.00071; Ding et al. 2024, "LongRoPE", https://arxiv.org/abs/2402.13753; Wang et al. 2024,
"Qwen2-VL", https://arxiv.org/abs/2409.12191 (sections, images); transformers 5.23, modeling_rope_utils.py.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError, InputError
from ligermodels.kernels._triton import is_capturing

_LENGTH = "original_max_position_embeddings"
# Required and optional keys of the rope dict. The default of the original length is max_position_embeddings.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {_LENGTH}),
    "yarn": (
        set(),
        {"factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", _LENGTH, "attention_factor"}),
    "proportional": (set(), {"factor"}),
}


class RotaryEmbedding(nn.Module):
    """cos and sin of every position.

    forward(position_ids, integers [B or 1, S]) -> (cos, sin), fp32 [B or 1, S, R/2] with
    R = int(head_dim * partial_rotary_factor), for "proportional" head_dim: one entry per pair of dims, for
    `ligermodels.kernels.rope`. With `sections`, also for position_ids [len(sections), B or 1, S]; [B, S] then stands
    for all sections.
    forward(x, position_ids) -> (cos, sin), [B or 1, S, R] in the dtype of x: each entry twice, as in transformers.

    theta: base of the frequencies. scaling: config.json's rope dict, with `rope_type` or the older `type`.
    max_position_embeddings: in tokens; "dynamic" needs it, other types use it if `scaling` has no
    original_max_position_embeddings. sections: the number of frequencies that use each position; their sum is R/2.
    interleaved: of n positions, frequency i uses position i % n for as long as that has frequencies left, then the
    first; else the sections follow each other.

    "dynamic" and "longrope" choose frequencies by the largest position of the call, on the device. Cached keys keep
    the frequencies of the call that made them: `needs_recompute` says when that is wrong. `of_length` gives the parts
    of a text the frequencies of the whole text.

    There are no parameters and buffers, so that the tables stay fp32 whatever the model is cast to, also for a model
    that was built on the meta device.

    Raises ConfigError for a rope type or key that is unknown or missing, and for an invalid value.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        partial_rotary_factor: float = 1.0,
        sections: Sequence[int] | None = None,
        interleaved: bool = False,
    ):
        super().__init__()
        self.rotating = int(head_dim * partial_rotary_factor // 2)  # frequencies that are not 0
        whole = (scaling or {}).get("rope_type") == "proportional"
        self.dim = head_dim if whole else int(head_dim * partial_rotary_factor)
        if self.dim < 2 or self.dim % 2 or max(self.dim, 2 * self.rotating) > head_dim:
            raise ConfigError(
                f"rope: head_dim={head_dim} and partial_rotary_factor={partial_rotary_factor} "
                f"rotate {self.dim} dims; it takes an even number from 2 to {head_dim}"
            )
        if not theta > 1:
            raise ConfigError(f"rope: theta={theta} must be above 1")
        if sections is not None and (min(sections, default=-1) < 0 or sum(sections) != self.dim // 2):
            raise ConfigError(
                f"rope: sections={list(sections)} must be 0 or more each and sum to {self.dim // 2}, the number of "
                "frequencies"
            )
        self.sections = None if sections is None else tuple(sections)
        self.interleaved = interleaved
        self.theta = theta
        self.scaling = _read(scaling or {}, theta, partial_rotary_factor, self.dim // 2)
        self.rope_type = self.scaling["rope_type"]
        self.max_position_embeddings = max_position_embeddings
        original_length = self.scaling.get(_LENGTH)
        self.original_length: Any = original_length or max_position_embeddings
        if self.original_length is None and self.rope_type not in ("default", "linear", "proportional"):
            instead = ", or original_max_position_embeddings in its dict"
            raise ConfigError(
                f"rope_type={self.rope_type!r} needs max_position_embeddings"
                f"{'' if self.rope_type == 'dynamic' else instead}"
            )
        if self.rope_type == "dynamic" and self.dim == 2:
            raise ConfigError("rope_type='dynamic' needs 4 or more rotated dims, and this rotates 2")
        # [1, R/2], or [2, R/2] for longrope: short, long. On the CPU, since other devices round powers differently.
        frequencies, self.attention_scaling = self._frequencies()
        self._inv_freq = torch.stack(frequencies)
        self._inv_freq_by_device = {self._inv_freq.device: self._inv_freq}
        self._last: tuple[tuple[int, int, torch.device], tuple[Tensor, Tensor]] | None = None
        self._least_length = 0

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        as_transformers, position_ids = position_ids is not None, x if position_ids is None else position_ids
        inv_freq = self._inv_freq_on(position_ids.device)
        if self.rope_type in ("dynamic", "longrope") and position_ids.numel():
            length = (position_ids.max() + 1).clamp(min=self._least_length)
            longer = inv_freq[1] if self.rope_type == "longrope" else self._stretched(length)
            frequencies = torch.where(length > self.original_length, longer, inv_freq[0])
        else:
            frequencies = inv_freq[0]
        angles = self._angles(position_ids, frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        if as_transformers:
            cos, sin = (torch.cat([table, table], -1).to(x.dtype) for table in (cos, sin))
        return cos, sin

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions 0 to length - 1, [1, length, R/2].

        The last tables are cached, which saves five kernels a step, except under torch.compile and CUDA graph capture,
        which need memory of their own.
        """
        if torch.compiler.is_compiling() or (device.type == "cuda" and is_capturing()):
            return self(torch.arange(length, device=device)[None])
        key = length, self._least_length, device
        if self._last is None or self._last[0] != key:
            with torch.inference_mode(False):  # kept beyond this call
                tables = self(torch.arange(length, device=device)[None])
            if type(tables[0]) is not Tensor:  # a FakeTensor
                return tables
            self._last = key, tables
        return self._last[1]

    @contextlib.contextmanager
    def of_length(self, length: int) -> Iterator[None]:
        """Within it, calls use the frequencies of a text of at least `length` tokens, of which they are parts."""
        self._least_length = length
        try:
            yield
        finally:
            self._least_length = 0

    def _angles(self, position_ids: Tensor, frequencies: Tensor) -> Tensor:
        if position_ids.dim() < 3:
            return position_ids[..., None].float() * frequencies
        if self.sections is None or len(position_ids) != len(self.sections):
            raise InputError(
                f"rope: position_ids have shape {tuple(position_ids.shape)}, and this table takes [B, S]"
                + ("" if self.sections is None else f" or [{len(self.sections)}, B, S]")
            )
        if self.interleaved:
            angles = position_ids[0][..., None].float() * frequencies
            for axis, count in list(enumerate(self.sections))[1:]:
                columns = slice(axis, len(self.sections) * count, len(self.sections))
                angles[..., columns] = position_ids[axis][..., None].float() * frequencies[columns]
            return angles
        sections = zip(position_ids, frequencies.split(self.sections), strict=True)
        return torch.cat([positions[..., None].float() * section for positions, section in sections], dim=-1)

    def needs_recompute(self, past: int, length: int) -> bool:
        """True if keys cached in calls of up to `past` tokens are wrong for a call that reaches `length` tokens.

        That is so when "longrope" switches from its short to its long frequencies: empty the cache and run the whole
        text again. "dynamic" keeps its cached keys, as in transformers.
        """
        return self.rope_type == "longrope" and 0 < past <= self.original_length < length

    def tokens_left(self, length: int) -> float:
        """The number of tokens that can follow the first `length` with the same frequencies."""
        remaining = self.original_length - length if self.rope_type in ("dynamic", "longrope") else math.inf
        return math.inf if remaining < 0 and self.rope_type == "longrope" else max(0, remaining)

    def extra_repr(self) -> str:
        sections = "" if self.sections is None else f", sections={self.sections}" + ", interleaved" * self.interleaved
        return f"dim={self.dim}, theta={self.theta}, rope_type={self.rope_type!r}{sections}"

    def _inv_freq_on(self, device: torch.device) -> Tensor:
        inv_freq = self._inv_freq_by_device.get(device)  # kept forever: a CUDA graph may read it
        if inv_freq is None:
            with torch.inference_mode(False):  # kept beyond this call
                inv_freq = self._inv_freq_by_device[device] = self._inv_freq.to(device)
        return inv_freq

    def _frequencies(self) -> tuple[list[Tensor], float]:
        """The frequencies (longrope: short and long), and the factor on cos and sin."""
        powers = self._powers(self.theta, torch.device("cpu"))
        match self.rope_type:
            case "linear":
                return [1.0 / powers / self.scaling["factor"]], 1.0
            case "llama3":
                return [self._llama3(1.0 / powers)], 1.0
            case "yarn":
                return self._yarn(powers)
            case "longrope":
                return self._longrope(powers)
            case "proportional":
                inv_freq = 1.0 / powers / self.scaling.get("factor", 1.0)
                inv_freq[self.rotating :] = 0.0
                return [inv_freq], 1.0
        return [1.0 / powers], 1.0

    def _powers(self, base: float | Tensor, device: torch.device) -> Tensor:
        return base ** (torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)

    def _stretched(self, length: Tensor) -> Tensor:
        """The frequencies of "dynamic" for `length` tokens."""
        factor = self.scaling["factor"]
        growth = (factor * length / self.original_length) - (factor - 1)
        base = self.theta * growth ** (self.dim / (self.dim - 2))
        return 1.0 / self._powers(base, length.device)

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        factor, original = self.scaling["factor"], self.original_length
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        wavelengths = 2 * math.pi / inv_freq
        slow = torch.where(wavelengths > original / low, inv_freq / factor, inv_freq)
        share = (original / wavelengths - low) / (high - low)
        blend = (1 - share) * slow / factor + share * slow
        between = (wavelengths >= original / high) & (wavelengths <= original / low)
        return torch.where(between, blend, slow)

    def _yarn(self, powers: Tensor) -> tuple[list[Tensor], float]:
        options, original = self.scaling, self.original_length
        factor = options.get("factor") or self._length_ratio()

        def index_of(rotations: float) -> float:
            """The (fractional) index of the frequency with this number of rotations over the original length."""
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low = index_of(options.get("beta_fast") or 32)
        high = index_of(options.get("beta_slow") or 1)
        if options.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
        extrapolated = 1 - ramp.clamp(0, 1)
        inv_freq = 1.0 / (factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated
        return [inv_freq], options.get("attention_factor") or _yarn_attention_factor(factor, options)

    def _longrope(self, powers: Tensor) -> tuple[list[Tensor], float]:
        options = self.scaling
        factors = (options["short_factor"], options["long_factor"])
        inv_freq = [1.0 / (torch.tensor(f, dtype=torch.float32, device="cpu") * powers) for f in factors]
        if "attention_factor" in options:
            return inv_freq, options["attention_factor"]
        factor = options.get("factor") or self._length_ratio()
        if factor <= 1:
            return inv_freq, 1.0
        return inv_freq, math.sqrt(1 + math.log(factor) / math.log(self.original_length))

    def _length_ratio(self) -> float:
        if self.max_position_embeddings is None:
            raise ConfigError(
                f"rope_type={self.rope_type!r} needs 'factor', or max_position_embeddings to derive it from"
            )
        return self.max_position_embeddings / self.original_length


class VisionRotary(nn.Module):
    """cos and sin for image patches: half of the frequencies of a head use the row, half the column.

    forward(positions, integers [2, ...]: row and column) -> (cos, sin), fp32 [..., head_dim / 2]: the row's entries,
    then the column's, for `ligermodels.kernels.rope`.
    """

    def __init__(self, head_dim: int, *, theta: float = 10000.0):
        super().__init__()
        if head_dim % 4:
            raise ConfigError(f"rope: head_dim={head_dim} of a vision tower must be a multiple of 4")
        self.axis = RotaryEmbedding(head_dim // 2, theta=theta)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat([*table], dim=-1) for table in self.axis(positions.flatten(1)))  # of [2, N, head_dim / 4]
        return cos.unflatten(0, positions.shape[1:]), sin.unflatten(0, positions.shape[1:])


def _yarn_attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return magnitude(options["mscale"]) / magnitude(options["mscale_all_dim"])
    return magnitude(1.0)


def _read(
    scaling: Mapping[str, Any], theta: float, partial_rotary_factor: float, num_frequencies: int
) -> dict[str, Any]:
    """Checks the rope dict; returns it with a `rope_type` and without null values."""
    options = {name: value for name, value in scaling.items() if value is not None}
    if "truncate" in scaling:
        options["truncate"] = scaling["truncate"] or False  # transformers: null is false, absent is true
    old_name = options.pop("type", "default")  # transformers 5 may leave an old `type` beside `rope_type`
    rope_type = options.setdefault("rope_type", old_name)
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", partial_rotary_factor)):
        if options.pop(name, value) != value:
            raise ConfigError(f"rope: {name}={scaling[name]} in the rope dict contradicts {value} beside it")
    if rope_type not in _KEYS:
        raise ConfigError(f"rope_type={rope_type!r} is not supported; supported: {', '.join(_KEYS)}")
    required, optional = _KEYS[rope_type]
    keys = options.keys() - {"rope_type"}
    if missing := sorted(required - keys):
        raise ConfigError(f"rope_type={rope_type!r} needs {', '.join(missing)}; its dict has {', '.join(scaling)}")
    if unknown := sorted(keys - required - optional):
        known = ", ".join(sorted(required | optional)) or "nothing"
        raise ConfigError(f"rope_type={rope_type!r} has no {', '.join(unknown)}; it takes {known}")
    for name in sorted(keys):
        _check_value(name, options[name], num_frequencies)
    if rope_type == "llama3" and options["low_freq_factor"] >= options["high_freq_factor"]:
        raise ConfigError(
            f"rope: low_freq_factor={options['low_freq_factor']} must be below "
            f"high_freq_factor={options['high_freq_factor']}"
        )
    return options


def _check_value(name: str, value: Any, num_frequencies: int) -> None:
    if name == "truncate":
        right, expected = isinstance(value, bool), "true or false"
    elif name in ("short_factor", "long_factor"):
        right = isinstance(value, list | tuple) and len(value) == num_frequencies and all(map(_positive, value))
        expected = f"a list of {num_frequencies} positive numbers, one per pair of rotated dims"
    elif name in ("mscale", "mscale_all_dim"):
        right, expected = _positive(value) or value == 0, "a number, 0 or more"
    else:
        right, expected = _positive(value), "a positive number"
    if not right:
        raise ConfigError(f"rope: {name}={str(value)[:60]} must be {expected}")


def _positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf
