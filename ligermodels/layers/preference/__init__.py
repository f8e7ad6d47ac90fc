"""Preference losses over hidden states and a linear head, without its logits in fp32: DPO, ORPO, CPO, SimPO and KTO.

Each is a module over hidden states (`Linear...Loss`) and, under it, a function of the log probabilities of sequences,
to be used with any: `dpo_loss`, `orpo_loss`, `cpo_loss`, `simpo_loss`, `kto_loss`. `sequence_logps` gives those of a
linear head. Nothing here synchronises with the device.
"""

from ligermodels.layers.preference.base import PreferenceOutput
from ligermodels.layers.preference.cpo import LinearCPOLoss, LinearSimPOLoss, cpo_loss, simpo_loss
from ligermodels.layers.preference.dpo import LinearDPOLoss, dpo_loss
from ligermodels.layers.preference.kto import KTOOutput, LinearKTOLoss, kto_kl, kto_loss
from ligermodels.layers.preference.orpo import LinearORPOLoss, log_odds, orpo_loss
from ligermodels.layers.preference.sequences import HeadOptions, sequence_logps

__all__ = [
    "HeadOptions",
    "KTOOutput",
    "LinearCPOLoss",
    "LinearDPOLoss",
    "LinearKTOLoss",
    "LinearORPOLoss",
    "LinearSimPOLoss",
    "PreferenceOutput",
    "cpo_loss",
    "dpo_loss",
    "kto_kl",
    "kto_loss",
    "log_odds",
    "orpo_loss",
    "sequence_logps",
    "simpo_loss",
]
