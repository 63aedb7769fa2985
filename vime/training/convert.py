"""Conversion between HuggingFace folders and torch_dist checkpoints: what ``tools/convert_*.py`` do.

Parameters go from the one format into the other one by one, by the rules of ``vime.models.weight_map``: memory is
bounded by the largest parameter, and neither Megatron nor a model is needed. The processes of torchrun share the work.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vime.checkpoints import TRACKER, CheckpointStore
from vime.config import Config
from vime.config.parse import resolve, violations_of
from vime.config.reading import read
from vime.config.rules import files, layout, model
from vime.errors import UserError, check_same_model
from vime.models import HfTensor, ModelShape, WeightRule, load_shape, weight_map
from vime.models.hf_folder import (
    HfWeights,
    bytes_of,
    check_replaceable,
    export_plan,
    new_model_folder,
    read_carried,
    shards_of,
    write_all_but_weights,
    write_shard,
)
from vime.observe.byte_progress import ByteProgress

if TYPE_CHECKING:
    from torch import Tensor

    from vime.models.torch_dist import TorchDistReader

__all__ = ["hf_to_torch_dist", "torch_dist_to_hf"]

RULES = (files.hf_checkpoint, layout.precision, model.matches_config_json, model.draft_layers)
PRECISION_FLAGS = {"bfloat16": "--bf16", "float16": "--fp16", "float32": "--fp32"}
EMBEDDING = "embedding.word_embeddings.weight"
MTP = "mtp.layers.0.enorm.weight"
CONVERTED = 0  # the iteration under which converted weights are stored
COMMON = {"content_metadata": {"optimizer": False, "scheduler": False}}  # see vime.training.checkpoint

T = TypeVar("T")


def hf_to_torch_dist(argv: Sequence[str]) -> Path:
    """``MODEL_ARGS --hf-checkpoint HF --save ROOT``: writes a checkpoint of weights only and returns its folder.

    A layer for multi-token prediction is in it with --mtp-num-layers 1. The dtype is that of the HF weights unless a
    precision flag is given. Collective.

    Raises:
        UserError: flags are wrong or differ from config.json, the weights do not fit, or ROOT has a run's checkpoints.
    """
    config = _config(argv)
    if config.checkpoint.save is None:
        raise UserError("--save is required: the root folder for the checkpoint")
    store = CheckpointStore(config.checkpoint.save)
    _check_holds_no_run(store)
    from vime.models.torch_dist import TorchDistWriter, finish, place_of
    from vime.training.torchrun import torchrun_ranks

    shape = _with_mtp(load_shape(config.checkpoint.hf_checkpoint), config.algorithm.mtp_num_layers or 0)
    with torchrun_ranks(_timeout(config)) as ranks, HfWeights(Path(config.checkpoint.hf_checkpoint)) as weights:
        weights.check_model(shape)
        work = ranks.from_first(store.begin(CONVERTED) if ranks.first else None)
        dtype = config.parallel.dtype_name
        sizes = {rule: sum(bytes_of(tensor, dtype) for tensor in rule.hf) for rule in weight_map(shape)}
        mine = _share(list(sizes), sizes.__getitem__, ranks.rank, ranks.size)
        total = sum(sizes[rule] for rule in mine)
        with TorchDistWriter(work, ranks.rank) as writer, _progress(ranks.rank, len(mine), total) as progress:
            for rule in mine:
                writer.add(place_of(rule.megatron, shape), _merged(weights, rule, config))
                progress.add(sizes[rule])
        regions = [region for of_rank in ranks.gather(writer.regions) for region in of_rank]
        if ranks.first:
            finish(work, regions, COMMON)
            store.commit(CONVERTED, state=None)
        ranks.wait()
    return store.root / f"iter_{CONVERTED:07d}"


def torch_dist_to_hf(
    input_dir: Path, output_dir: Path, origin_hf_dir: Path, *, vocab_size: int | None = None, flags: Sequence[str] = ()
) -> None:
    """Writes the weights of one checkpoint, in the dtype in which they are there, as an HF folder. Collective.

    Args:
        origin_hf_dir: where config.json, the tokenizer and what the checkpoint does not have come from.
        vocab_size: rows of embedding and output layer to keep, if not those of the origin's config.json.
        flags: MODEL_ARGS.

    Raises:
        UserError: the folders are not what they should be, or the checkpoint is of another model.
    """
    _check_is_one_checkpoint(input_dir)
    check_replaceable(output_dir, origin_hf_dir)
    from vime.models.torch_dist import TorchDistReader
    from vime.training.torchrun import torchrun_ranks

    reader = TorchDistReader(input_dir)
    shape = _with_vocabulary(load_shape(origin_hf_dir), reader, vocab_size)
    dtype = str(reader.dtype(EMBEDDING)).removeprefix("torch.")
    config = _config(["--hf-checkpoint", str(origin_hf_dir), PRECISION_FLAGS[dtype], *flags])
    shape = _with_mtp(shape, config.algorithm.mtp_num_layers or (shape.num_mtp_layers if MTP in reader else 0))
    _check_fits(reader, shape)
    rules, carried = export_plan(origin_hf_dir, shape)
    plan = [*(tensor for rule in rules for tensor in rule.hf), *carried]
    shards = shards_of(plan, dtype)
    with torchrun_ranks(_timeout(config)) as ranks:
        mine = shards[ranks.rank :: ranks.size]
        tensors = [tensor for shard in mine for tensor in shard.tensors if tensor not in carried]
        total = sum(bytes_of(tensor, dtype) for tensor in tensors)
        with new_model_folder(output_dir, origin_hf_dir) if ranks.first else nullcontext() as new:
            work = ranks.from_first(new)
            with _progress(ranks.rank, len(tensors), total) as progress:
                for shard in mine:
                    trained = _taken_apart(
                        reader, (t for t in shard.tensors if t not in carried), rules, shape, dtype, progress
                    )
                    rest = read_carried(origin_hf_dir, [t for t in shard.tensors if t in carried])
                    write_shard(work, shard, chain(trained, rest), dtype)
            ranks.wait()
            if ranks.first:
                write_all_but_weights(work, origin=origin_hf_dir, plan=plan, dtype=dtype)
        ranks.wait()


def _config(argv: Sequence[str]) -> Config:
    """The flags that describe a model; those of a run are neither needed nor looked at."""
    words = [*argv, *_precision(argv)]
    config = resolve(words).config
    problems = [*read(words).errors, *(violation.message for violation in violations_of(RULES, config))]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if not config.checkpoint.hf_checkpoint:
        raise UserError("--hf-checkpoint is required: the model's HuggingFace folder")
    return config


def _precision(argv: Sequence[str]) -> list[str]:
    """The flag for the dtype of the HF weights, where none is given."""
    hf_dir = resolve(argv).config.checkpoint.hf_checkpoint
    if not hf_dir or not Path(hf_dir).is_dir() or any(flag in argv for flag in PRECISION_FLAGS.values()):
        return []
    dtype = load_shape(hf_dir).dtype
    return [PRECISION_FLAGS[dtype]] if dtype in PRECISION_FLAGS else []


def _timeout(config: Config) -> datetime.timedelta:
    return datetime.timedelta(minutes=config.cluster.distributed_timeout_minutes)


def _progress(rank: int, tensors: int, nbytes: int) -> ByteProgress:
    """Each process shows its own part; most are alone."""
    what = "converted" if rank == 0 else f"process {rank} converted"
    return ByteProgress(what, tensors=tensors, nbytes=nbytes)


def _share(items: Sequence[T], nbytes: Callable[[T], int], rank: int, size: int) -> list[T]:
    """This rank's part of the items: consecutive ones, of about as many bytes as every other rank's."""
    total = sum(map(nbytes, items))
    mine, before = [], 0
    for item in items:
        middle = before + nbytes(item) / 2
        if int(middle * size / total) == rank:
            mine.append(item)
        before += nbytes(item)
    return mine


def _merged(weights: HfWeights, rule: WeightRule, config: Config) -> Tensor:
    """A Megatron parameter of the whole model, the vocabulary padded for the layout that the flags describe."""
    import torch

    dtype = getattr(torch, rule.hf[0].dtype or config.parallel.dtype_name)
    tensor = rule.op.merge([weights.read(part.name) for part in rule.hf]).to(dtype)
    if rule.vocabulary:
        multiple = config.parallel.tensor_model_parallel_size * config.checkpoint.make_vocab_size_divisible_by
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % multiple))
    return tensor


def _taken_apart(
    reader: TorchDistReader,
    tensors: Iterable[HfTensor],
    rules: Sequence[WeightRule],
    shape: ModelShape,
    dtype: str,
    progress: ByteProgress,
) -> Iterator[tuple[str, Tensor]]:
    """HF tensors, each read when it is asked for; those of one parameter share one reading."""
    import torch

    by_name = {tensor.name: rule for rule in rules for tensor in rule.hf}
    last: WeightRule | None = None
    parts: dict[str, Tensor] = {}
    for tensor in tensors:
        rule = by_name[tensor.name]
        if rule is not last:
            place = reader.find(rule.megatron, shape)
            assert place is not None, rule.megatron
            split = rule.op.split(reader.read(place))
            last, parts = rule, dict(zip((each.name for each in rule.hf), split, strict=True))
        part = parts.pop(tensor.name).to(getattr(torch, tensor.dtype or dtype))
        yield tensor.name, part[: tensor.shape[0]] if rule.vocabulary else part
        progress.add(bytes_of(tensor, dtype))


def _check_fits(reader: TorchDistReader, shape: ModelShape) -> None:
    """Says which parameters the checkpoint lacks or has in another shape, before any is read."""
    problems = [problem for rule in weight_map(shape) if (problem := _problem(reader, rule, shape))]
    check_same_model(reader.folder, problems)


def _problem(reader: TorchDistReader, rule: WeightRule, shape: ModelShape) -> str | None:
    import torch

    place = reader.find(rule.megatron, shape)
    if place is None:
        return f"it has no {rule.megatron}"
    wanted = tuple(rule.op.merge([torch.empty(part.shape, device="meta") for part in rule.hf]).shape)
    there = reader.shape_at(place)
    padded = rule.vocabulary and there[0] >= wanted[0] and there[1:] == wanted[1:]
    return None if padded or there == wanted else f"its {rule.megatron} is {list(there)} instead of {list(wanted)}"


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


def _with_mtp(shape: ModelShape, layers: int) -> ModelShape:
    return dataclasses.replace(shape, trained_mtp_layers=layers)


def _with_vocabulary(shape: ModelShape, reader: TorchDistReader, vocab_size: int | None) -> ModelShape:
    if EMBEDDING not in reader:
        raise UserError(f"{reader.folder} has no {EMBEDDING}; it is not a checkpoint of a language model")
    rows = reader.shape(EMBEDDING)[0]
    wanted = vocab_size or shape.vocab_size
    if wanted > rows:
        said = f"--vocab-size {vocab_size} is" if vocab_size else f"the origin's config.json has vocab_size {wanted},"
        raise UserError(
            f"{said} more than the {rows} embedding rows of {reader.folder}; give --vocab-size of at most {rows}"
        )
    return dataclasses.replace(shape, vocab_size=wanted)
