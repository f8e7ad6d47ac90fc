"""Tiny checkpoints and a tokenizer, written by transformers, and both models of each; theirs is the expectation."""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import ligermodels
from tests import sizes
from tests.arch import qwen3_vl

SIZES = sizes.SIZES | dict(
    max_position_embeddings=128, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=3
)
OWN = {
    "llama": dict(tie_word_embeddings=True),
    "qwen2": dict(tie_word_embeddings=False),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=6, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0),
    "mixtral": dict(num_local_experts=4, router_aux_loss_coef=0.1, output_router_logits=True),
    "phi3": dict(tie_word_embeddings=False),
    "qwen3_5_text": dict(head_dim=16, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4),
}  # fmt: skip
OWN["qwen3_5_moe_text"] = OWN["qwen3_5_text"] | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28
)
FAMILIES = ("llama", "qwen2")
"""One with a tied head, one with an untied head and biases."""
WORDS = ["<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", *"abcdefghijklmnopqrstuvwxyz"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|> {% generation %}"
    "{{ message.content }} </s> {% endgeneration %}{% else %}<|user|> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token a word, the words being letters; the chat template marks what the assistant says."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>"], chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_TEMPLATE = (
    "{% for message in messages %}<|user|> {% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}"
    "<|assistant|> "
)


class Processor(transformers.Qwen3VLProcessor):
    """Without videos, whose processor needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        self.vision_start_token, self.vision_end_token, self.image_token, self.video_token = MARKS
        ids = tokenizer.convert_tokens_to_ids(list(MARKS))
        self.vision_start_token_id, self.vision_end_token_id, self.image_token_id, self.video_token_id = ids


def make_processor() -> Processor:
    """The tokenizer, and images of 16 to 256 pixels in patches of 2 x 2."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", *MARKS]})
    size = {"shortest_edge": 16, "longest_edge": 256}
    images = Qwen2VLImageProcessorPil(patch_size=2, merge_size=2, temporal_patch_size=2, size=size)
    return Processor(image_processor=images, tokenizer=tokenizer, chat_template=IMAGE_TEMPLATE)


def write_image_checkpoint(folder: Path) -> Path:
    """A Qwen3-VL with the ids of `make_processor`; no text has the id of a video."""
    processor, drawn = make_processor(), dict(initializer_range=0.2)
    text = drawn | dict(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    config = qwen3_vl.qwen3_vl(drawn, drawn, **text) | dict(
        vision_start_token_id=processor.vision_start_token_id, vision_end_token_id=processor.vision_end_token_id,
        image_token_id=processor.image_token_id, video_token_id=200,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration._from_config(transformers.AutoConfig.for_model(**config))
    model.generation_config.update(eos_token_id=2, pad_token_id=3)
    model.save_pretrained(folder)
    return Path(folder)


def write_checkpoint(folder: Path, family: str, seed: int = 0, **changes) -> Path:
    """Model and tokenizer of a family, as transformers writes them; the biases are not zero."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **OWN[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return Path(folder)


def ours(folder: Path, **options):
    return ligermodels.load(str(folder), device="cpu", progress=False, **options)


def theirs(folder: Path, **options):
    """transformers' model with its plainest attention."""
    options = {"attn_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options)


def ours_and_theirs(folder: Path, **options):
    return ours(folder, **options), theirs(folder, **options)


def quantization_settings(folder: Path) -> dict:
    """Those in config.json, without what transformers notes of how it loaded them."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {key: value for key, value in settings.items() if not key.startswith("_")}


def make_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(len(WORDS), (rows, length), generator=torch.Generator().manual_seed(seed))


def letters(seed: int, number: int) -> str:
    """Letters with spaces between them, a token each."""
    return " ".join(WORDS[6 + i % 26] for i in make_ids(1, number, seed)[0].tolist())


class Texts(torch.utils.data.Dataset):
    """Rows of ids, their labels, a mask; the ends of some rows are padding."""

    def __init__(self, rows: int = 16, length: int = 12):
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = make_ids(1, self.length, seed=index)[0]
        mask = (torch.arange(self.length) < self.length - index % 3).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_trainer(model, folder, trainer_options=None, **options) -> transformers.Trainer:
    defaults = dict(
        save_strategy="no", max_steps=4, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=1,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(folder, **{**defaults, **options})
    return transformers.Trainer(
        model, arguments, train_dataset=Texts(), eval_dataset=Texts(8), **(trainer_options or {})
    )


def logged(trainer, name="loss") -> torch.Tensor:
    return torch.tensor([float(entry[name]) for entry in trainer.state.log_history if name in entry])


def assert_same_logs(found, expected, *names) -> None:
    """Of two trainers, transformers' and TRL's included."""
    for name in names:
        one, other = logged(found, name), logged(expected, name)
        assert len(other) > 1
        # fp32 on both sides: gradients differ in their last bits, which Adam's division spreads over a few steps. The
        # logs round to four or six digits.
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
