"""Conversion between HuggingFace folders and torch_dist checkpoints: what ``tools/convert_*.py`` do.

One process is enough; with torchrun the ranks are pipeline stages unless flags say otherwise. torch and Megatron are
imported after all that can be said about flags and folders without them.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime.checkpoints import TRACKER, CheckpointStore
from vime.config import Config
from vime.config.parse import resolve
from vime.config.reading import read
from vime.config.rules import files, layout, model
from vime.errors import UserError
from vime.models import ModelShape, load_shape
from vime.models.hf_folder import check_replaceable

__all__ = ["hf_to_torch_dist", "torch_dist_to_hf"]

RULES = (files.hf_checkpoint, layout.precision, layout.layout, model.matches_config_json)
PRECISION_FLAGS = {"bfloat16": "--bf16", "float16": "--fp16", "float32": "--fp32"}
EMBEDDING = "embedding.word_embeddings.weight"
CONVERTED = 0  # the iteration under which converted weights are stored


def hf_to_torch_dist(argv: Sequence[str]) -> Path:
    """``MODEL_ARGS --hf-checkpoint HF --save ROOT``: writes a checkpoint of weights only and returns its folder.

    The dtype is that of the HF weights unless a precision flag is given. Collective.

    Raises:
        UserError: flags are wrong or differ from config.json, the weights do not fit, or ROOT has a run's checkpoints.
    """
    config = _config(argv)
    if config.checkpoint.save is None:
        raise UserError("--save is required: the root folder for the checkpoint")
    store = CheckpointStore(config.checkpoint.save)
    _check_holds_no_run(store)
    with _ranks(config) as rank:
        from torch.distributed import barrier

        from vime.training.build import build_chunks
        from vime.training.checkpoint import save_megatron
        from vime.training.weights_io import load_hf_weights

        shape = load_shape(config.checkpoint.hf_checkpoint)
        chunks = build_chunks(shape, config, trainable=False)
        load_hf_weights(chunks, shape, config.checkpoint.hf_checkpoint)
        save_megatron(_begin_on_first_rank(store, rank), chunks)
        if rank == 0:
            store.commit(CONVERTED, state=None)
        barrier()
    return store.root / f"iter_{CONVERTED:07d}"


def torch_dist_to_hf(
    input_dir: Path, output_dir: Path, origin_hf_dir: Path, *, vocab_size: int | None = None, flags: Sequence[str] = ()
) -> None:
    """Writes the weights of one checkpoint, in the dtype in which they are there, as an HF folder. Collective.

    Args:
        origin_hf_dir: where config.json and the tokenizer come from.
        vocab_size: rows of embedding and output layer to keep, if not those of the origin's config.json.
        flags: MODEL_ARGS and the parallel layout.

    Raises:
        UserError: the folders are not what they should be, or the checkpoint is of another model.
    """
    _check_is_one_checkpoint(input_dir)
    check_replaceable(output_dir, origin_hf_dir)
    shape = _with_vocabulary(load_shape(origin_hf_dir), input_dir, vocab_size)
    dtype = str(_embedding(input_dir)[1]).removeprefix("torch.")
    config = _config(["--hf-checkpoint", str(origin_hf_dir), PRECISION_FLAGS[dtype], *flags])
    with _ranks(config):
        from vime.training.build import build_chunks
        from vime.training.checkpoint import load_weights
        from vime.training.weights_io import save_hf

        chunks = build_chunks(shape, config, trainable=False)
        load_weights(input_dir, chunks)
        save_hf(output_dir, chunks, shape, origin_hf_dir)


def _config(argv: Sequence[str]) -> Config:
    """The flags that describe a model and its layout; those of a run are neither needed nor looked at."""
    words = [*argv, *_default_flags(argv)]
    config = resolve(words).config
    problems = [*read(words).errors, *(violation.message for rule in RULES for violation in rule(config))]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if not config.checkpoint.hf_checkpoint:
        raise UserError("--hf-checkpoint is required: the model's HuggingFace folder")
    return config


def _default_flags(argv: Sequence[str]) -> Iterator[str]:
    """How many ranks there are, the dtype of the HF weights, and ranks as pipeline stages."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    yield from ("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(ranks))
    config = resolve(argv).config
    hf_dir = config.checkpoint.hf_checkpoint
    if not hf_dir or not Path(hf_dir).is_dir():
        return
    shape = load_shape(hf_dir)
    if not any(flag in argv for flag in PRECISION_FLAGS.values()) and shape.dtype in PRECISION_FLAGS:
        yield PRECISION_FLAGS[shape.dtype]
    if ranks > 1 and config.parallel.model_parallel_size == 1:
        if shape.num_layers % ranks:
            raise UserError(
                f"{ranks} processes cannot share {shape.num_layers} layers evenly; choose another number of processes, "
                "or --tensor-model-parallel-size and --pipeline-model-parallel-size"
            )
        yield from ("--pipeline-model-parallel-size", str(ranks))


@contextmanager
def _ranks(config: Config) -> Iterator[int]:
    """Joins torchrun's processes and yields the rank of this one; without torchrun it is alone."""
    from vime.training.parallel import connect, disconnect

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else _free_port()
    connect(config, rank=rank, world_size=world_size, master_addr=address, master_port=port)
    try:
        yield rank
    finally:
        disconnect()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _begin_on_first_rank(store: CheckpointStore, rank: int) -> str:
    from torch.distributed import broadcast_object_list

    folder = [str(store.begin(CONVERTED)) if rank == 0 else ""]
    broadcast_object_list(folder, src=0)
    return folder[0]


def _check_holds_no_run(store: CheckpointStore) -> None:
    """Converted weights may replace converted weights, and nothing else."""
    for iteration in store.iterations():
        point = store.resolve(ckpt_step=iteration)
        if iteration != CONVERTED or (point is not None and not point.weights_only):
            raise UserError(f"--save {store.root}: has checkpoints of a run ({iteration}); choose another folder")


def _check_is_one_checkpoint(input_dir: Path) -> None:
    if not input_dir.is_dir():
        raise UserError(f"--input-dir {input_dir}: no such folder")
    inside = sorted(path.name for path in input_dir.glob("iter_*"))
    if inside or (input_dir / TRACKER).is_file():
        there = ", ".join(inside) or "none is there"
        raise UserError(f"--input-dir {input_dir} is a root; name one of its checkpoints: {there}")


def _embedding(input_dir: Path) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the embedding in a checkpoint."""
    from vime.platform import current

    current().prepare_megatron()
    from vime.training.checkpoint import weights_of

    tensors = weights_of(input_dir)
    if EMBEDDING not in tensors:
        raise UserError(f"{input_dir} has no {EMBEDDING}; it is not a checkpoint of a language model")
    return tensors[EMBEDDING]


def _with_vocabulary(shape: ModelShape, input_dir: Path, vocab_size: int | None) -> ModelShape:
    rows = _embedding(input_dir)[0][0]
    wanted = vocab_size or shape.vocab_size
    if wanted > rows:
        said = f"--vocab-size {vocab_size} is" if vocab_size else f"the origin's config.json has vocab_size {wanted},"
        raise UserError(
            f"{said} more than the {rows} embedding rows of {input_dir}; give --vocab-size of at most {rows}"
        )
    return dataclasses.replace(shape, vocab_size=wanted)
