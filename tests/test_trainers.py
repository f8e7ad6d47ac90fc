"""The model in other people's training loops: FSDP2 on two processes, and trainers where they are installed.

`pip install accelerate peft trl datasets` beside the test extra runs all of them.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ligermodels.recompute
from ligermodels.arch import ARCHS

CONFIG = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


FAMILIES = {
    "llama": {},
    "gemma2": dict(
        head_dim=8, query_pre_attn_scalar=12, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "mixtral": dict(num_local_experts=4, router_aux_loss_coef=0.1),
}


def make(tied=True, family="llama", **changes):
    config = {**CONFIG, **FAMILIES[family], "tie_word_embeddings": tied, "initializer_range": 0.2, **changes}
    return ARCHS[family].from_config(config, dtype=torch.float32, device="cpu")


def on_two_ranks(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    ligermodels.recompute.SMALLEST = 1  # a process of its own: nobody else sees it
    ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(1))
    # The balancing loss of a mixture of experts is left out: each process balances its own tokens.
    for kind in ((True, "llama"), (False, "llama"), (True, "gemma2"), (False, "mixtral")):
        whole, sharded = make(*kind), make(*kind)
        mesh = init_device_mesh("cpu", (2,))
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for recompute, offload in (("none", False), ("block", False), ("none", True)):
            sharded.gradient_checkpointing_enable({"recompute": recompute, "offload": offload})
            whole.zero_grad()
            sharded.zero_grad()
            whole(ids, labels=ids).loss.backward()
            mine = ids.chunk(2)[rank]
            sharded(mine, labels=mine).loss.backward()
            for found, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
    dist.destroy_process_group()


def test_fsdp2_gives_the_gradients_of_one_process(tmp_path):
    mp.spawn(on_two_ranks, args=(tmp_path / "meeting",), nprocs=2)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(97, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def arguments(folder, **options):
    options = {"save_strategy": "no", "max_steps": 4, "per_device_train_batch_size": 4, **options}
    return transformers.TrainingArguments(
        folder, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=1, **options
    )


@pytest.mark.parametrize(
    "kind", [dict(), dict(family="gemma2"), dict(family="mixtral", output_router_logits=True)], ids=str
)
def test_trainer_sees_the_losses_of_transformers(tmp_path, kind):
    pytest.importorskip("accelerate")
    make(**kind).save_pretrained(tmp_path / "model")
    losses = []
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", experts_implementation="eager"
    )
    for model in (make(**kind), hf):
        trainer = transformers.Trainer(
            model.train(), arguments(tmp_path / "run", gradient_accumulation_steps=2), train_dataset=Tokens()
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)


def test_trainer_evaluates_and_resumes_exactly(tmp_path):
    pytest.importorskip("accelerate")
    options = dict(
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, gradient_checkpointing=True
    )
    models = make(), make()
    for model, resume in zip(models, (None, str(tmp_path / "checkpoint-2")), strict=True):
        trainer = transformers.Trainer(
            model, arguments(tmp_path, **options), train_dataset=Tokens(), eval_dataset=Tokens()
        )
        trainer.train(resume_from_checkpoint=resume)
        assert any("eval_loss" in entry for entry in trainer.state.log_history)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("modules", [["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"], "all-linear"], ids=str)
def test_peft_adapters_are_trained_and_merged(modules):
    peft = pytest.importorskip("peft")
    ids = torch.randint(97, (2, 8))
    options = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, r=4, init_lora_weights=False)
    model = peft.get_peft_model(make(tied=False), options)
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad.abs().sum() > 0 for parameter in trained)
    expected = model(input_ids=ids).logits
    assert (expected - make(tied=False)(ids).logits).abs().max() > 1e-3
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"loss_type": "nll"}, {"packing": True, "max_length": 16}], ids=str)
def test_trl_fine_tunes(tmp_path, options):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "<eos>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    config = trl.SFTConfig(
        tmp_path, max_steps=20, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no",
        use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"text": ["a b c d e f g h i j"] * 16})
    trainer = trl.SFTTrainer(make(), args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < 0.5 * float(losses[0])
