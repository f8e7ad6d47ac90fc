"""What a training loop needs besides the model: optimizers, captured steps, gradients that add up in place, experts
that are balanced without a loss, LoRA, Medusa heads, the layer for multi-token prediction."""

from ligermodels.training.adamw import AdamW as AdamW
from ligermodels.training.balancing import (
    count_expert_loads as count_expert_loads,
    update_router_biases as update_router_biases,
)
from ligermodels.training.capture import CapturedStep as CapturedStep
from ligermodels.training.determinism import deterministic as deterministic
from ligermodels.training.gradients import accumulate_in_place as accumulate_in_place
from ligermodels.training.lora import (
    adapters_off as adapters_off,
    add_lora as add_lora,
    load_adapter as load_adapter,
    merge_lora as merge_lora,
    save_adapter as save_adapter,
)
from ligermodels.training.medusa import add_medusa as add_medusa, load_medusa as load_medusa, save_medusa as save_medusa
from ligermodels.training.mtp import add_mtp as add_mtp, load_mtp as load_mtp
from ligermodels.training.muon import MuonAdamW as MuonAdamW, matrices_of as matrices_of
