"""Asks llama.cpp's server (xllamacpp), in a process of its own, which its threads outlive. Keys and values are fp32."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MARKER = "<image>"
"""What stands for an image in a prompt; the server draws its own."""
_SERVER = f"""
import json, os, sys, urllib.request
import xllamacpp
file, adapter, mmproj, context, requests = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.port = file, context, 1, False, 0
params.use_jinja = params.fit_params = False
params.cache_ram_mib = 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # two that wait for each other are slow on few cores
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if adapter:
    lora = xllamacpp.CommonAdapterLoraInfo()
    lora.path, lora.scale = adapter, 1.0
    params.lora_adapters = [lora]
if mmproj:
    params.mmproj.path, params.mmproj_use_gpu, params.image_min_tokens = mmproj, False, 1
server = xllamacpp.Server(params)
def ask(path, body=None):
    request = urllib.request.Request(server.listening_address + path, body, {{"Content-Type": "application/json"}})
    return json.load(urllib.request.urlopen(request, timeout=600))
marker = ask("/props")["media_marker"] if mmproj else ""
answers = [ask(path, json.dumps(body).replace("{MARKER}", marker).encode()) for path, body in requests]
print(json.dumps(answers), flush=True)
os._exit(0)
"""


def ask(
    file: Path,
    *requests: tuple[str, dict[str, Any]],
    adapter: Path | str = "",
    mmproj: Path | str = "",
    context: int = 256,
) -> list[dict[str, Any]]:
    """The server's answers to (path, body) of each request. file: GGUF. adapter, mmproj: GGUF files beside it."""
    arguments = json.dumps([str(file), str(adapter), str(mmproj), context, requests])
    done = subprocess.run([sys.executable, "-c", _SERVER, arguments], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def next_token(prompt: Any, force: int, probabilities: int) -> tuple[str, dict[str, Any]]:
    """The request of the likeliest next tokens, for `logprobs`. prompt: ids, or text and images.

    A token is forced, for half a character has no probabilities. They are those before the bias.
    """
    body = {"prompt": prompt, "n_predict": 1, "n_probs": probabilities, "temperature": -1}
    return "/completion", {**body, "logit_bias": [[force, 1000.0]]}


def logprobs(answer: dict[str, Any]) -> dict[int, float]:
    """{id: log probability} of the answer to `next_token`."""
    return {token["id"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}
