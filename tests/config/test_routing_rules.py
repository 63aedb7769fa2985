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
            ["--vllm-kv-offloading-size", "1"],
            f"{FLAG} and --vllm-kv-offloading-size exclude each other: an engine that gets keys and values from "
            "elsewhere does not know where their tokens went",
        ),
        (
            ["--vllm-decode-context-parallel-size", "2"],
            f"{FLAG} and --vllm-decode-context-parallel-size exclude each other: an engine that divides contexts "
            "tells no routes",
        ),
    ],
)
def test_engines_that_cannot_tell_routes_are_refused(
    moe_flags: Callable[..., list[str]], words: list[str], message: str
) -> None:
    assert message in resolve(moe_flags(FLAG, *words)).violations
    assert message not in resolve(moe_flags(*words)).violations


@pytest.mark.parametrize("cpus", [True, False])
def test_classes_of_ones_own_are_refused_on_cpus_alone(
    moe_flags: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, cpus: bool
) -> None:
    """Where vLLM records routes by itself it does so with any scheduler."""
    monkeypatch.setattr("vime.config.rules.model.is_cpu_build", lambda: cpus)
    words = ["--vllm-scheduler-cls", "my.Scheduler", "--vllm-worker-cls", "my.Worker"]
    found = set(resolve(moe_flags(FLAG, *words)).violations) - set(resolve(moe_flags(*words)).violations)
    why = "on CPUs vime needs a {} of its own to record routes"
    refused = {
        f"{FLAG} and --vllm-{each}-cls exclude each other: {why.format(each)}" for each in ("scheduler", "worker")
    }
    assert found == (refused if cpus else set())


@pytest.mark.parametrize("with_replay", [[FLAG], []])
@pytest.mark.parametrize(
    "words",
    [
        ["--vllm-enable-return-routed-experts"],
        ["--no-vllm-enable-return-routed-experts"],
        ["--vllm-aux-output-config", '{"max_bytes": 1000}'],
    ],
)
def test_whether_engines_tell_routes_is_said_once(
    moe_flags: Callable[..., list[str]], words: list[str], with_replay: list[str]
) -> None:
    found = [each for each in resolve(moe_flags(*with_replay, *words)).violations if words[0].lstrip("-")[3:] in each]
    assert len(found) == 1 and f"use {FLAG}" in found[0]


def test_what_changes_nothing_may_be_said(moe_flags: Callable[..., list[str]]) -> None:
    words = ["--vllm-decode-context-parallel-size", "1", "--vllm-worker-cls", "auto", "--vllm-enable-prefix-caching"]
    assert resolve(moe_flags(FLAG, *words)).violations == resolve(moe_flags(*words)).violations


def test_fine_tuning_samples_nothing(moe_flags: Callable[..., list[str]]) -> None:
    words = moe_flags(FLAG, "--loss-type", "sft_loss")
    message = f"{FLAG}: fine-tuning on given dialogues samples nothing, so there are no routes to follow"
    assert message in resolve(words).violations
