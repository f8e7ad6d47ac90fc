"""How long the commands take to answer, and what loading on a CPU takes in memory.

    python -m benchmarks.startup

Writes two Llamas with random weights into a temporary folder: a tiny one, and one of SmolLM2-135M's sizes in fp32 (513
MiB). Each command runs in a process of its own, after a first run that warms the page cache; the median counts.
`import torch` is a row too: no command that computes can be faster. Memory is the peak resident set of a process, in
which pages that are mapped from the file count.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ligermodels import Llama

_TINY = dict(
    model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
)  # fmt: skip
_SMOLLM2 = {
    **_TINY, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
_PEAK = "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024)"
_LOAD = "import ligermodels; ligermodels.Llama; model = ligermodels.load({!r}, progress=False); "

_ONE_TOKEN = "import torch; model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        tiny, large = (str(Path(root, name)) for name in ("tiny", "smollm2"))
        for folder, config in ((tiny, _TINY), (large, _SMOLLM2)):
            Llama.from_config(config, dtype=torch.float32).save_pretrained(folder)
        commands = {
            "import torch": ["-c", "import torch"],
            "--help": ["-m", "ligermodels", "--help"],
            "inspect FOLDER": ["-m", "ligermodels", "inspect", large],
            "inspect /not/there": ["-m", "ligermodels", "inspect", "/not/there"],
            "generate /not/there": ["-m", "ligermodels", "generate", "/not/there", "--prompt", "a"],
            "load, and one token": ["-c", _LOAD.format(tiny) + _ONE_TOKEN],
        }
        print("| command | seconds |\n|---|---:|")
        for name, command in commands.items():
            times = []
            for _ in range(options.runs + 1):
                start = time.perf_counter()
                subprocess.run([sys.executable, *command], capture_output=True, check=False)
                times.append(time.perf_counter() - start)
            print(f"| {name} | {statistics.median(times[1:]):.2f} |", flush=True)
        print("\n| process | peak MiB |\n|---|---:|")
        for name, code in (
            ("imports only", "import ligermodels; ligermodels.Llama; "),
            ("loads 513 MiB of fp32 weights", _LOAD.format(large)),
        ):
            done = subprocess.run([sys.executable, "-c", code + _PEAK], capture_output=True, check=True, text=True)
            print(f"| {name} | {float(done.stdout):,.0f} |")


if __name__ == "__main__":
    main()
