"""Direct preference optimisation of a language model: a loop of plain PyTorch, no trainer.

    python examples/finetune_dpo.py

A small random Llama learns to prefer counting upwards to counting downwards. With a checkpoint of your own the loop is
the same: ligermodels.load(...) twice, token ids from a tokenizer, labels at the tokens of the answers. The reference
costs one forward; its log probabilities can as well be computed once for a data set (`sequence_logps`) and given as
ref_logps, and then no second model is in memory.
"""

import copy

import torch
import torch.nn.functional as F

import ligermodels
from ligermodels.layers.preference import LinearDPOLoss, PreferenceOutput

IGNORED, VOCAB, PROMPT, ANSWER = -100, 32, 4, 8
CONFIG = dict(model_type="llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)  # fmt: skip


def pairs(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [2 * number, length], the chosen sequences first, and labels: the next tokens, without the prompt's."""
    prompt = torch.randint(VOCAB, (number, 1)) + torch.arange(PROMPT)
    ahead = torch.arange(1, ANSWER + 1)
    chosen, rejected = (torch.cat([prompt, prompt[:, -1:] + step * ahead], dim=1) for step in (1, -1))
    ids = torch.cat([chosen, rejected]).remainder(VOCAB)
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)  # nothing follows the last token
    labels[:, : PROMPT - 1] = IGNORED
    return ids, labels


def train(steps: int = 60, batch: int = 8, device: str = "cpu") -> list[PreferenceOutput]:
    torch.manual_seed(0)
    policy = ligermodels.Llama.from_config(CONFIG, dtype=torch.float32, device=device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    dpo = LinearDPOLoss(beta=0.1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    outputs = []
    for _ in range(steps):
        ids, labels = (x.to(device) for x in pairs(batch))
        with torch.no_grad():
            ref_x = reference.base_model(ids).last_hidden_state
        output = dpo(
            policy.base_model(ids).last_hidden_state,  # hidden states: the loss makes what it needs of the logits
            policy.lm_head.weight,
            labels,
            ref_x=ref_x,
            ref_weight=reference.lm_head.weight,
            num_valid=2 * batch * ANSWER,
        )
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output)
    return outputs


if __name__ == "__main__":
    for step, output in enumerate(train(device="cuda" if torch.cuda.is_available() else "cpu")):
        if step % 10 == 0:
            print(f"step {step}: loss {output.loss:.4f}, margin {output.reward_margin:.3f}, "
                  f"accuracy {output.reward_accuracy:.2f}")  # fmt: skip
