"""Layouts that cannot work: the reason, and the nearest ones that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vime.config import layouts, resolve
from vime.config.layouts import FLAGS, Layout, described, nearest, problems
from vime.config.sections.parallel import Parallel
from vime.models import ModelShape
from vime.models.shape import MlaShape, MoeShape


def shape_of(**fields: Any) -> ModelShape:
    """The sizes of Qwen3-4B, but for ``fields``."""
    sizes: dict[str, Any] = {
        "num_layers": 36,
        "hidden_size": 2560,
        "ffn_hidden_size": 9728,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
    }
    rest = {"norm_epsilon": 1e-6, "rotary_base": 1e6, "max_position_embeddings": 40960, "vocab_size": 151936}
    return ModelShape(architecture="Qwen3ForCausalLM", **sizes | rest | fields)


DENSE = shape_of()
MOE = shape_of(
    num_layers=48,
    num_query_groups=4,
    moe=MoeShape(num_experts=128, top_k=8, ffn_hidden_size=768, dense_layers=frozenset()),
)

REFUSED = {
    "heads": (
        DENSE,
        {"world": 24, "tensor": 3},
        "--tensor-model-parallel-size 3 does not divide the model's 32 attention heads and 8 key/value heads and 9728 "
        "channels of an MLP; nearest that work: --tensor-model-parallel-size 4, 2 or 8",
    ),
    "a key/value head is never shared by ranks": (
        DENSE,
        {"world": 16, "tensor": 16},
        "--tensor-model-parallel-size 16 does not divide the model's 8 key/value heads; nearest that work: "
        "--tensor-model-parallel-size 8, 4 or 2",
    ),
    "slots": (
        DENSE,
        {"world": 6, "tensor": 4},
        "6 training slots (--actor-num-nodes x --actor-num-gpus-per-node) must be a multiple of tensor x pipeline x "
        "context parallel size = 4; nearest that work: --tensor-model-parallel-size 2 or 1",
    ),
    "slots that need two changes": (
        DENSE,
        {"world": 9, "tensor": 2, "pipeline": 4},
        "9 training slots (--actor-num-nodes x --actor-num-gpus-per-node) must be a multiple of tensor x pipeline x "
        "context parallel size = 8; nearest that work: --tensor-model-parallel-size 1 with "
        "--pipeline-model-parallel-size 3, --tensor-model-parallel-size 1 with --pipeline-model-parallel-size 9 or "
        "--tensor-model-parallel-size 1 with --pipeline-model-parallel-size 1",
    ),
    "layers": (
        DENSE,
        {"world": 8, "pipeline": 8},
        "--pipeline-model-parallel-size 8 does not divide the model's 36 layers; nearest that work: "
        "--pipeline-model-parallel-size 4, 2 or 1",
    ),
    "layers beside a shorter first stage": (
        DENSE,
        {"world": 4, "pipeline": 4, "first_stage": 7},
        "--pipeline-model-parallel-size 4 with --decoder-first-pipeline-num-layers 7 does not divide the model's 36 "
        "layers; nearest that work: no --decoder-first-pipeline-num-layers or --pipeline-model-parallel-size 2",
    ),
    "virtual stages": (
        DENSE,
        {"world": 4, "pipeline": 4, "virtual": 2},
        "--virtual-pipeline-model-parallel-size 2 does not divide the 9 layers of a pipeline rank; nearest that work: "
        "--virtual-pipeline-model-parallel-size 3, --virtual-pipeline-model-parallel-size 1 or "
        "--pipeline-model-parallel-size 2",
    ),
    "virtual stages of an uneven pipeline": (
        DENSE,
        {"world": 2, "pipeline": 2, "virtual": 2, "first_stage": 16, "last_stage": 17},
        "--pipeline-model-parallel-size 2 with --decoder-first-pipeline-num-layers 16 with "
        "--decoder-last-pipeline-num-layers 17 does not divide the model's 36 layers; nearest that work: no "
        "--decoder-last-pipeline-num-layers",
    ),
    "virtual stages alone": (
        DENSE,
        {"world": 1, "virtual": 2},
        "--virtual-pipeline-model-parallel-size 2 needs --pipeline-model-parallel-size above 1; nearest that work: "
        "--virtual-pipeline-model-parallel-size 1",
    ),
    "sequence parallelism alone": (
        DENSE,
        {"world": 2, "sequence": True},
        "--sequence-parallel needs --tensor-model-parallel-size above 1; nearest that work: no --sequence-parallel or "
        "--tensor-model-parallel-size 2",
    ),
    "experts of a dense model": (
        DENSE,
        {"world": 2, "expert": 2},
        "--expert-model-parallel-size 2 needs a mixture-of-experts model, which this one is not; nearest that work: "
        "--expert-model-parallel-size 1",
    ),
    "expert tensor parallelism of a dense model": (
        DENSE,
        {"world": 2, "expert_tensor": 2},
        "--expert-tensor-parallel-size 2 needs a mixture-of-experts model, which this one is not; nearest that work: "
        "--expert-tensor-parallel-size 1",
    ),
    "experts": (
        MOE,
        {"world": 12, "expert": 6},
        "--expert-model-parallel-size 6 does not divide the model's 128 experts; nearest that work: "
        "--expert-model-parallel-size 4, 2 or 1",
    ),
    "tensor parallelism of experts without sequence parallelism": (
        MOE,
        {"world": 4, "tensor": 2},
        "a mixture-of-experts model with --tensor-model-parallel-size above 1 needs --sequence-parallel; nearest that "
        "work: --sequence-parallel or --tensor-model-parallel-size 1",
    ),
    "slots for experts": (
        MOE,
        {"world": 8, "tensor": 2, "sequence": True, "expert": 8},
        "8 training slots (--actor-num-nodes x --actor-num-gpus-per-node) must be a multiple of expert x expert tensor "
        "x pipeline parallel size = 16; nearest that work: --expert-model-parallel-size 4, 2 or 1",
    ),
    "channels of an expert": (
        MOE,
        {"world": 10, "expert_tensor": 5},
        "--expert-tensor-parallel-size 5 does not divide the model's 768 channels of an expert; nearest that work: "
        "--expert-tensor-parallel-size 2 or 1",
    ),
}


@pytest.mark.parametrize(("shape", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_why_a_layout_cannot_work_and_what_would(shape: ModelShape, fields: dict[str, Any], message: str) -> None:
    layout = Layout(**fields)
    offers = described(layout, nearest(layout, shape))
    assert f"{'; '.join(problems(layout, shape))}; nearest that work: {offers}" == message


WORKING = {
    "tensor, sequence": (DENSE, {"world": 8, "tensor": 8, "sequence": True}),
    "uneven stages": (DENSE, {"world": 4, "pipeline": 4, "first_stage": 8, "last_stage": 8}),
    "interleaved": (DENSE, {"world": 4, "pipeline": 4, "virtual": 3}),
    "experts over data": (MOE, {"world": 8, "expert": 8}),
    "experts whole beside cut attention": (
        MOE,
        {"world": 8, "tensor": 4, "sequence": True, "expert": 8, "expert_tensor": 1},
    ),
    "latent attention has no key/value heads": (
        shape_of(
            num_query_groups=1,
            mla=MlaShape(q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
        ),
        {"world": 16, "tensor": 16},
    ),
    "no dense layer, so its channels do not count": (
        dataclasses.replace(MOE, ffn_hidden_size=7),
        {"world": 2, "tensor": 2, "sequence": True},
    ),
    "one expert tensor rank is right for a dense model": (DENSE, {"world": 2, "tensor": 2, "expert_tensor": 1}),
}


@pytest.mark.parametrize(("shape", "fields"), WORKING.values(), ids=WORKING)
def test_layouts_that_work(shape: ModelShape, fields: dict[str, Any]) -> None:
    assert list(problems(Layout(**fields), shape)) == []


SHAPES = st.builds(
    lambda layers, heads, groups, ffn, moe: shape_of(
        num_layers=layers, num_attention_heads=heads * groups, num_query_groups=groups, ffn_hidden_size=ffn, moe=moe
    ),
    st.integers(1, 61),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([192, 9728, 7]),
    st.none()
    | st.builds(
        MoeShape,
        num_experts=st.sampled_from([1, 6, 8, 128]),
        top_k=st.just(1),
        ffn_hidden_size=st.sampled_from([5, 768]),
        dense_layers=st.sampled_from([frozenset(), frozenset({0})]),
        shared_ffn_hidden_size=st.none() | st.just(768),
    ),
)
LAYOUTS = st.builds(
    Layout,
    world=st.integers(1, 32),
    tensor=st.integers(1, 6),
    sequence=st.booleans(),
    pipeline=st.integers(1, 6),
    virtual=st.integers(1, 3),
    first_stage=st.none() | st.integers(1, 9),
    last_stage=st.none() | st.integers(1, 9),
    context=st.integers(1, 3),
    expert=st.integers(1, 4),
    expert_tensor=st.none() | st.integers(1, 4),
)


@given(layout=LAYOUTS, shape=SHAPES)
@settings(max_examples=200, deadline=None)
def test_there_is_always_an_offer_and_every_offer_works(layout: Layout, shape: ModelShape) -> None:
    offers = nearest(layout, shape)
    assert offers
    for offer in offers:
        assert list(problems(offer, shape)) == []
        assert offer.world == layout.world
        assert described(layout, [offer]) or offer == layout


@given(layout=LAYOUTS, shape=SHAPES)
@settings(max_examples=50, deadline=None)
def test_a_layout_that_works_is_its_own_nearest(layout: Layout, shape: ModelShape) -> None:
    if not any(problems(layout, shape)):
        assert nearest(layout, shape)[0] == layout


QWEN3_235B = shape_of(
    num_layers=94,
    num_attention_heads=64,
    num_query_groups=4,
    moe=MoeShape(num_experts=128, top_k=8, ffn_hidden_size=1536, dense_layers=frozenset()),
)


def test_few_layouts_are_looked_at_before_there_is_an_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are 5.5 million: 9 divisors of 256 for each of five sizes, and 94 numbers of virtual stages."""
    looked_at = []

    def counted(layout: Layout, shape: ModelShape | None) -> Iterator[str]:
        looked_at.append(layout)
        return problems(layout, shape)

    monkeypatch.setattr(layouts, "problems", counted)
    sizes = {"tensor": 3, "pipeline": 4, "virtual": 2, "context": 2, "expert": 8, "expert_tensor": 2}
    layout = Layout(world=256, sequence=True, **sizes)
    assert described(layout, nearest(layout, QWEN3_235B)).startswith(
        "--tensor-model-parallel-size 4 with --pipeline-model-parallel-size 2 with "
        "--virtual-pipeline-model-parallel-size 1, "
    )
    assert len(looked_at) < 10_000


def test_a_search_that_takes_too_long_offers_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LOOKS", 1)
    assert nearest(Layout(world=8, tensor=3, pipeline=5), DENSE) == [Layout(world=8)]


def layout_flags(layout: Layout) -> list[str]:
    words = ["--actor-num-gpus-per-node", str(layout.world), "--num-gpus-per-node", "64"]
    for name, flag in FLAGS.items():
        value = getattr(layout, name)
        if value is True:
            words.append(flag)
        elif value not in (False, None):
            words += [flag, str(value)]
    return words


def test_offers_also_share_the_samples_of_a_step_evenly(flags) -> None:
    """Without tensor parallelism the four ranks would have to share two samples."""
    words = "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 3 --rollout-batch-size 1 --n-samples-per-prompt 2"
    (line,) = [line for line in resolve(flags(*words.split())).violations if "nearest" in line]
    assert line.endswith("key/value heads; nearest that work: --tensor-model-parallel-size 2")


@given(layout=LAYOUTS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_offers_pass_the_rules_of_a_command_line(flags, layout: Layout) -> None:
    shape = shape_of(num_layers=2, num_attention_heads=6, num_query_groups=2, ffn_hidden_size=192)
    layout = dataclasses.replace(layout, virtual=1, first_stage=None, last_stage=None)
    for offer in nearest(layout, shape):
        lines = resolve(flags(*layout_flags(offer))).violations
        assert not [line for line in lines if "nearest" in line]


def test_the_layers_of_a_virtual_stage_say_how_many_there_are() -> None:
    parallel = Parallel(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=3)
    assert parallel.virtual_stages(36) == 6
    assert parallel.virtual_stages(6) is None


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        ("", 1),
        ("--virtual-pipeline-model-parallel-size 1", 1),
        ("--virtual-pipeline-model-parallel-size 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 2", 1),  # a whole pipeline rank of the model's four layers
        ("--num-layers-per-virtual-pipeline-stage 1", 2),
    ],
)
def test_only_interleaved_pipelines_take_micro_batches_in_rounds(flags, words: str, multiple: int) -> None:
    words = f"--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 {words}"
    config = resolve(flags(*words.split())).config
    layout = Layout.of(config, shape_of(num_layers=4))
    assert layout.micro_batch_multiple == multiple


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "--num-layers-per-virtual-pipeline-stage 2 x --pipeline-model-parallel-size 2 = 4 does not divide the "
            "model's 2 layers",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1",
            "--num-layers-per-virtual-pipeline-stage 1 needs --pipeline-model-parallel-size above 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--virtual-pipeline-model-parallel-size 1",
            "--num-layers-per-virtual-pipeline-stage and --virtual-pipeline-model-parallel-size exclude each other",
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 2",
            "--recompute-method uniform with --recompute-num-layers 2 does not divide the 1 layers of a pipeline "
            "stage; block takes any number",
        ),
    ],
)
def test_layers_are_counted_before_anything_starts(flags, words: str, line: str) -> None:
    assert line in resolve(flags("--actor-num-gpus-per-node", "2", *words.split())).violations


def test_stages_with_more_or_fewer_layers_have_megatron_lms_names(flags) -> None:
    words = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1"
    megatron = resolve(flags(*words.split())).config.megatron
    assert megatron["num_layers_in_first_pipeline_stage"] == 3
    assert megatron["num_layers_in_last_pipeline_stage"] == 1
