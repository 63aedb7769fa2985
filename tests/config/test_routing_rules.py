"""What following routes needs, told before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.config import Config, parse_config, resolve

FLAG = "--use-rollout-routing-replay"
PUBLIC = Path(__file__).parents[1] / "models" / "public_configs" / "qwen3-30B-A3B.json"


@pytest.fixture
def moe_flags(flags: Callable[..., list[str]], model_dir: Path) -> Callable[..., list[str]]:
    config = json.loads(PUBLIC.read_text())["config"]
    (model_dir / "config.json").write_text(json.dumps(config))
    return flags


def test_it_is_off_unless_asked_for(moe_flags: Callable[..., list[str]]) -> None:
    def on(*words: str) -> bool:
        config: Config = parse_config(moe_flags(*words))
        return config.algorithm.use_rollout_routing_replay

    assert (on(), on(FLAG), on(FLAG, "--use-routing-replay")) == (False, True, True)


@pytest.mark.parametrize("flag", [FLAG, "--use-routing-replay"])
def test_a_dense_model_has_no_routes(flags: Callable[..., list[str]], flag: str) -> None:
    expected = f"{flag} needs a mixture-of-experts model, which Qwen3ForCausalLM is not"
    assert resolve(flags(flag)).violations == (expected,)


@pytest.mark.parametrize("flag", [FLAG, "--use-routing-replay"])
@pytest.mark.parametrize("way", ["--moe-router-load-balancing-type sinkhorn", "--moe-router-fusion"])
def test_some_ways_to_choose_cannot_be_told_routes(moe_flags: Callable[..., list[str]], flag: str, way: str) -> None:
    assert f"{flag} and {way} exclude each other" in resolve(moe_flags(flag, *way.split())).violations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--no-vllm-enable-prefix-caching"],
            f"{FLAG} needs the prefix cache of the engines: leave out --no-vllm-enable-prefix-caching",
        ),
        (
            ["--vllm-kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
            f"{FLAG} and --vllm-kv-transfer-config exclude each other: an engine that gets keys and values from "
            "elsewhere does not know where their tokens went",
        ),
        (
            ["--vllm-decode-context-parallel-size", "2"],
            f"{FLAG} and --vllm-decode-context-parallel-size exclude each other: an engine that divides contexts "
            "tells no routes",
        ),
        (
            ["--vllm-scheduler-cls", "my.Scheduler"],
            f"{FLAG} and --vllm-scheduler-cls exclude each other: on CPUs vime needs a scheduler of its own to record "
            "routes",
        ),
    ],
)
def test_engines_that_cannot_tell_routes_are_refused(
    moe_flags: Callable[..., list[str]], words: list[str], message: str
) -> None:
    assert message in resolve(moe_flags(FLAG, *words)).violations
    assert message not in resolve(moe_flags(*words)).violations


def test_what_changes_nothing_may_be_said(moe_flags: Callable[..., list[str]]) -> None:
    words = ["--vllm-decode-context-parallel-size", "1", "--vllm-worker-cls", "auto", "--vllm-enable-prefix-caching"]
    assert resolve(moe_flags(FLAG, *words)).violations == resolve(moe_flags(*words)).violations


def test_fine_tuning_samples_nothing(moe_flags: Callable[..., list[str]]) -> None:
    words = moe_flags(FLAG, "--loss-type", "sft_loss")
    message = f"{FLAG}: fine-tuning on given dialogues samples nothing, so there are no routes to follow"
    assert message in resolve(words).violations
