#!/usr/bin/env bash
# Makes .venv with everything that training on a CPU, the tests and the checks need. Nothing is done twice.
#   PYTHON=python3.12 bash scripts/install.sh      another interpreter (3.11 or 3.12)
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0+cpu # the CPU build is not on PyPI; it is tried with pip's own configuration first
TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON=${PYTHON:-python3}

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' ||
  { echo "vime needs Python 3.11 or 3.12, $PYTHON is $("$PYTHON" --version 2>&1); set PYTHON" >&2; exit 1; }
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv ||
  { echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2; exit 1; }

pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  echo "installing torch $TORCH"
  "${pip[@]}" "torch==$TORCH" 2>/dev/null || "${pip[@]}" "torch==$TORCH" --extra-index-url "$TORCH_INDEX"
fi
echo "installing vime and what it needs (3.9 GB, some minutes)"
"${pip[@]}" --editable '.[cpu,dev]'
# PyPI's builds of these want CUDA and break `import transformers`; vime needs none of them on a CPU
.venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
.venv/bin/python -c 'import torch, transformers, vllm, ray, megatron.core' ||
  { echo "the installation is not usable; the message is above" >&2; exit 1; }
touch .venv/.complete
