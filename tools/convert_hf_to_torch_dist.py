"""Writes a HuggingFace model as a Megatron torch_dist checkpoint, for --ref-load and --load.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist

The model's shape comes from its config.json; MODEL_ARGS are checked against it. Memory is bounded by the largest
parameter, not by the model. With torchrun the processes share the work.
"""

from __future__ import annotations

import sys

from vime.errors import UserError


def main() -> None:
    if len(sys.argv) == 1 or {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        raise SystemExit(0)
    from vime.training.convert import hf_to_torch_dist

    try:
        print(f"wrote {hf_to_torch_dist(sys.argv[1:])}")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
