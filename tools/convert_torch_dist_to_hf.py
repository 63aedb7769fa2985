"""Writes one Megatron torch_dist checkpoint, converted or saved by a run, as a HuggingFace model.

    python tools/convert_torch_dist_to_hf.py --input-dir run/iter_0000020 --output-dir Qwen3-4B-20 \\
        --origin-hf-dir Qwen3-4B

Config and tokenizer are those of --origin-hf-dir. Further flags (MODEL_ARGS) are those of training. Memory is bounded
by the largest parameter, not by the model. With torchrun the processes share the files to write.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vime.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="one checkpoint: a folder iter_…, not its root")
    parser.add_argument("--output-dir", type=Path, required=True, help="the folder to write")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="where config and tokenizer come from")
    parser.add_argument("--vocab-size", type=int, help="embedding rows to keep, if not as many as config.json says")
    args, flags = parser.parse_known_args()
    from vime.training.convert import torch_dist_to_hf

    try:
        torch_dist_to_hf(args.input_dir, args.output_dir, args.origin_hf_dir, vocab_size=args.vocab_size, flags=flags)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {args.output_dir}")


if __name__ == "__main__":
    main()
