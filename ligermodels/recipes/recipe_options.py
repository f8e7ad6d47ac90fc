"""The options of each recipe of `ligermodels train`. The recipes stand in files of their own, which import torch.

Nothing here imports torch, so that --help and mistyped flags are quick.
"""

from dataclasses import dataclass
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes.options import TextOptions, TrainOptions, fields_of, flag, free_option, option, shown

# The choices are those of layers/preference.py, layers/policy.py and kernels/loss/linear_jsd.py, which a test compares.
DPO_TYPES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
             "apo_zero", "apo_down", "discopop")  # fmt: skip
"""Loss types of DPO that are a mean over pairs; the others sort a batch, and would depend on how it is packed."""
KTO_TYPES = ("kto", "apo_zero_unpaired")
POLICY_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo")
_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")
_READ_BY = {
    **dict.fromkeys(("epsilon", "epsilon_high"), (*_CLIPS, "cispo")), "delta": _CLIPS,
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
}  # fmt: skip
"""The policy losses that read an option, for options that not all of them read."""
DIVERGENCES = ("jsd", "tv", "cosine")
REWARD_SCALES = ("group", "batch", "none")


@dataclass(kw_only=True)
class SFTOptions(TextOptions):
    recipe = "sft"
    assistant_only_loss: bool = option(
        True, "train what the assistant says; off: every token, the prompts too", group="loss"
    )
    neftune_noise_alpha: float = option(  # type: ignore[misc]
        0.0,
        "noise on the embeddings in training, as in the NEFTune paper, such as 5",
        least=0,
        excludes=("capture", "mtp_loss_weight", "cp", "tp"),
    )


@dataclass(kw_only=True)
class PretrainOptions(TextOptions):
    recipe = "pretrain"
    scratch: bool = option(  # type: ignore[misc]
        False,
        "draw the weights at random, by the config.json of MODEL; the learning rate is then 3e-4 by default",
        excludes=("lora_r",),
        group="pretraining",
    )
    weight_decay: float = option(0.1, "weight decay of matrices; norms and biases have none", least=0)
    adam_beta2: float = option(0.95, "beta2 of AdamW", least=0, below=1)

    @property
    def default_rate(self) -> float:
        return 3e-4 if self.scratch else super().default_rate


@dataclass(kw_only=True)
class PreferenceOptions(TrainOptions):
    default_rates = (1e-6, 1e-5)
    sequences = 2
    unsupported = dict.fromkeys(("cp", "tp"), "preferences are trained with whole rows on each GPU")
    beta: float = option(
        0.1, "the scale of the log probabilities, or of their ratios to the reference", above=0, group="loss"
    )
    loss_type = "sigmoid"


@dataclass(kw_only=True)
class PairOptions(PreferenceOptions):
    label_smoothing: float = option(0.0, "the share of pairs whose order is taken to be wrong", least=0, below=0.5)
    sft_weight: float = option(
        0.0, "weight of the cross entropy of the chosen answers, which is added to the loss (RPO)", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        from ligermodels.layers import preference as losses  # imports torch

        check = losses.check_dpo if self.compares else losses.check_cpo
        check(self.loss_type, self.beta, self.label_smoothing)


@dataclass(kw_only=True)
class DPOOptions(PairOptions):
    recipe = "dpo"
    compares = True
    loss_type: str = option("sigmoid", "loss per pair; sigmoid_norm and ipo are per token", choices=DPO_TYPES)


@dataclass(kw_only=True)
class ORPOOptions(PreferenceOptions):
    recipe = "orpo"
    beta: float = option(
        0.1, "weight of the log odds ratio of the two answers, beside their cross entropy", above=0, group="loss"
    )
    loss_type = "orpo"
    sft_weight = 1.0


@dataclass(kw_only=True)
class CPOOptions(PairOptions):
    recipe = "cpo"
    simpo_gamma = 0.0
    loss_type: str = option("sigmoid", "loss per pair", choices=("sigmoid", "hinge", "ipo"))
    sft_weight: float = option(1.0, "weight of the cross entropy of the chosen answers, which is added", least=0)


@dataclass(kw_only=True)
class SimPOOptions(PairOptions):
    recipe = "simpo"
    loss_type = "simpo"
    simpo_gamma: float = option(0.5, "target reward margin", least=0)


@dataclass(kw_only=True)
class KTOOptions(PreferenceOptions):
    recipe = "kto"
    compares = True
    sequences = 1
    examples = 8  # a forward compares its answers with each other
    loss_type: str = option("kto", "loss per answer", choices=KTO_TYPES)
    desirable_weight: float = option(1.0, "weight of good answers", least=0)
    undesirable_weight: float = option(1.0, "weight of others", least=0)


@dataclass(kw_only=True)
class MedusaOptions(TrainOptions):
    recipe = "medusa"
    default_rates = (1e-3, 1e-3)
    unsupported = {  # noqa: RUF012
        **dict.fromkeys(("cp", "tp"), "heads are trained under FSDP alone"),
        **dict.fromkeys(("lora_r", "router_bias_rate"), "heads are trained on a frozen model"),
    }
    heads: int = option(4, "number of heads; head k predicts the token k + 1 ahead", least=1, group="heads")
    head_layers: int = option(1, "residual blocks of each head", least=0)
    head_decay: float = option(0.8, "the k-th head's loss is weighted by this to the power k", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optim == "muon":
            raise InputError("optim=muon: heads are no matrices of blocks; leave --optim out")


@dataclass(kw_only=True)
class RolloutOptions(TrainOptions):
    """The options of recipes whose model samples completions of prompts."""

    samples = True
    num_generations = 1
    temperature = 1.0
    num_iterations = 1
    # fmt: off
    prompts: int = option(8, "prompts per step, over all ranks", least=1, needs="on_policy", group="rollout")
    max_completion_length: int = option(256, "maximum tokens of a completion", least=1, needs="on_policy")
    rollout_rows: int | None = free_option(
        None, "completions that are sampled at a time on each GPU (default: all)", least=1, needs="on_policy")
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples and self.accumulation not in (None, self.prompts):
            raise InputError(
                f"accumulation={self.accumulation}: a step that samples has prompts; give --prompts in its place"
            )
        self.accumulation = self.prompts if self.samples else self.accumulation

    @property
    def rows_at_once(self) -> int:
        """The number of completions that a GPU samples at a time."""
        return self.rollout_rows or self.prompts * self.num_generations


@dataclass(kw_only=True)
class DistillOptions(RolloutOptions):
    recipe = "distill"
    unsupported = dict.fromkeys(("ep", "tp"), "a teacher is sharded by FSDP alone")
    # fmt: off
    teacher: str = option(
        "", "repository on the Hub, folder, or GGUF file of the model to learn from", required=True, group="loss")
    loss_type: str = option(
        "jsd", "divergence from the teacher: generalised JSD, total variation of the distributions, or cosine distance "
        "of the logits", choices=DIVERGENCES)
    beta: float = option(1.0, "of the generalised JSD: 0 forward KL, 1 reverse KL", least=0, most=1)
    temperature: float = option(1.0, "divides the logits of both, and in sampling", above=0)
    soft_weight: float | None = option(None, "weight of the divergence (default 1 - hard_weight)", least=0)
    hard_weight: float = option(
        0.0, "weight of the cross entropy of the examples' own tokens", least=0, excludes=("on_policy",))
    on_policy: bool = option(False, "train on sampled completions of the prompts (lmbda 1 of GKD)", excludes=("cp",))
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type != "jsd" and self.beta != fields_of(self)["beta"].default:
            raise InputError(f"beta={self.beta:g}: the loss {self.loss_type} does not read it; leave --beta out")
        if self.soft_weight is None and self.hard_weight >= 1:
            raise InputError(
                f"hard_weight={self.hard_weight:g} leaves 1 - hard_weight, nothing, for the teacher; give less, or "
                "--soft-weight as well"
            )
        if self.soft_weight == 0:
            raise InputError("soft_weight=0 leaves nothing of the teacher; give more, or train sft")

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of the divergence and of the cross entropy."""
        soft = 1 - self.hard_weight if self.soft_weight is None else self.soft_weight
        return soft, self.hard_weight

    @property
    def samples(self) -> bool:  # type: ignore[override]
        return self.on_policy


@dataclass(kw_only=True)
class GRPOOptions(RolloutOptions):
    recipe = "grpo"
    default_rates = (1e-6, 1e-5)
    unsupported = dict.fromkeys(("cp", "tp"), "a model whose rows or layers are split does not sample")
    # fmt: off
    reward_funcs: tuple[str, ...] = option(
        (), "FILE.py:FUNCTION, or several; reward(prompts, completions, **columns) gives a list of numbers",
        required=True, group="policy")
    reward_weights: tuple[float, ...] = option((), "weight of each reward in their sum (default 1)")
    scale_rewards: str = option(
        "group", "what advantages are divided by: the deviation of rewards of the prompt, of the step, or nothing (as "
        "dr_grpo wants it)", choices=REWARD_SCALES)
    num_generations: int = option(8, "completions of each prompt, which are compared with each other", least=2)
    temperature: float = option(1.0, "divides the logits, in sampling and in the loss", above=0)
    num_iterations: int = option(1, "steps that train on the same completions", least=1)
    mask_truncated_completions: bool = option(
        False, "completions that did not end in --max-completion-length train nothing")
    router_replay: bool = option(
        False, "the tokens of a step take the experts that they took in the rollout (mixtures of experts)")
    loss_type: str = option("dapo", "as TRL's; dapo: the mean over all tokens of a step", choices=POLICY_LOSSES)
    beta: float = option(
        0.0, "weight of the KL divergence to the model as it was, which is added to the loss", least=0)
    epsilon: float | None = option(
        None, "lower clip: ratios below 1 - epsilon (0.2; gspo 3e-4, luspo 2e-3)", least=0)
    epsilon_high: float | None = option(
        None, "upper clip: ratios above 1 + epsilon_high (--epsilon; without it 0.2, dapo 0.28, gspo 4e-4, luspo "
        "2.5e-3); cispo: above epsilon_high (5)", least=0)
    delta: float | None = option(
        None, "a bound of ratios where advantages are negative, such as 4, above 1 + epsilon_high (two-sided clipping)",
        above=1)
    sapo_temperature_pos: float = option(
        1.0, "sapo: how quickly a token's weight falls with its ratio's distance from 1, for advantages above 0",
        above=0)
    sapo_temperature_neg: float = option(1.05, "sapo: the same for other advantages", above=0)
    vespo_k_pos: float = option(
        2.0, "vespo: sequences are weighted by w^k exp(lambda (1 - w)), where w is their ratio; for advantages of 0 or "
        "more", least=0)
    vespo_lambda_pos: float = option(3.0, "vespo: lambda of these", least=0)
    vespo_k_neg: float = option(3.0, "vespo: k for negative advantages", least=0)
    vespo_lambda_neg: float = option(2.0, "vespo: lambda for negative advantages", least=0)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise InputError(
                f"reward_weights: there are {len(self.reward_weights)} for {len(self.reward_funcs)} rewards"
            )
        fields = fields_of(self)
        for name, kinds in _READ_BY.items():
            if getattr(self, name) != fields[name].default and self.loss_type not in kinds:
                raise InputError(
                    f"{name}={shown(getattr(self, name))}: the loss {self.loss_type} does not read it; leave "
                    f"{flag(name)} out, or give --loss-type {' or '.join(kinds)}"
                )
        if self.delta is not None and self.delta <= 1 + self.clip["high"]:
            raise InputError(
                f"delta={self.delta:g} must be more than 1 + epsilon_high={1 + self.clip['high']:g}, which bounds "
                "ratios for positive advantages; raise --delta, such as to 4"
            )

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.beta > 0

    @property
    def clip(self) -> dict[str, Any]:
        """The bounds of ratios, for layers.policy."""
        low = {"gspo": 3e-4, "luspo": 2e-3}.get(self.loss_type, 0.2) if self.epsilon is None else self.epsilon
        high = {"gspo": 4e-4, "luspo": 2.5e-3, "dapo": 0.28, "cispo": 5.0}.get(self.loss_type, 0.2)
        high = next(x for x in (self.epsilon_high, self.epsilon, high) if x is not None)
        return dict(low=low, high=high, delta=self.delta)

    @property
    def weights(self) -> dict[str, Any]:
        """The numbers of the losses without a clip, for `token_losses` of layers.policy."""
        return dict(
            temperatures=(self.sapo_temperature_pos, self.sapo_temperature_neg),
            gammas=((self.vespo_k_pos, self.vespo_lambda_pos), (self.vespo_k_neg, self.vespo_lambda_neg)),
        )
