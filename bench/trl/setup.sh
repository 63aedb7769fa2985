#!/usr/bin/env bash
# Makes .venv-trl, in which the reference of grpo_step_vs_trl runs. Nothing is done twice.
#   PYTHON=python3.12 bash bench/trl/setup.sh      another interpreter (3.11 or 3.12)
set -euo pipefail
cd "$(dirname "$0")/../.."

TORCH=2.13.0+cpu # the same torch as vime's; it is not on PyPI, and tried with pip's own configuration first
TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
REQUIREMENTS=bench/trl/requirements.txt

cmp --quiet "$REQUIREMENTS" .venv-trl/.complete && exit 0
[ -x .venv-trl/bin/python ] || "$PYTHON" -m venv .venv-trl
pip=(.venv-trl/bin/python -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" "torch==$TORCH" 2>/dev/null || "${pip[@]}" "torch==$TORCH" --extra-index-url "$TORCH_INDEX"
"${pip[@]}" --requirement "$REQUIREMENTS"
cp "$REQUIREMENTS" .venv-trl/.complete
