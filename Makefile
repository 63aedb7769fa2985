# make demo    train a 135M language model with GRPO on this machine's CPU and watch it learn
# make sft     fine-tune it on the answers instead: no engines, one minute
# make test    all tests but the slow ones;  make test-full: those too
# make check   format, lint, types, import contracts
# make bench   throughput and overhead, as one JSON object
PY := .venv/bin/python
MODEL := models/SmolLM2-135M-Instruct
TASK := data/arithmetic

.PHONY: install demo sft test test-full check format bench clean

install: .venv/.complete

.venv/.complete: pyproject.toml scripts/install.sh
	bash scripts/install.sh

$(MODEL)/model.safetensors: | install
	$(PY) tools/fetch_smollm2.py $(MODEL)

$(TASK)/train.jsonl: tools/make_arithmetic.py | install
	$(PY) tools/make_arithmetic.py $(TASK)

demo: install $(MODEL)/model.safetensors $(TASK)/train.jsonl
	bash scripts/run-smollm2-135M-cpu.sh

sft: install $(MODEL)/model.safetensors $(TASK)/train.jsonl
	bash scripts/run-smollm2-135M-sft-cpu.sh

test: install
	$(PY) -m pytest -m "not slow"

test-full: install
	$(PY) -m pytest

check: install
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports

format: install
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: install $(MODEL)/model.safetensors $(TASK)/train.jsonl
	$(PY) -m bench

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build
