"""The critic's flags: what they are for, what differs between actor and critic, and what is refused."""

from __future__ import annotations

import pytest

from vime.config import parse_config, resolve
from vime.config.roles import critic_config

PPO = ("--advantage-estimator", "ppo")


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "megatron.yaml"
        path.write_text(text)
        return str(path)

    return write


def said(words: list[str]) -> tuple[str, ...]:
    return resolve(words).violations


def test_the_critic_is_as_large_as_the_actor_unless_told_otherwise(flags):
    cluster = parse_config(flags(*PPO, "--actor-num-gpus-per-node", "2")).cluster
    assert (cluster.critic_num_nodes, cluster.critic_num_gpus_per_node, cluster.critic_world_size) == (1, 2, 2)
    assert (cluster.train_slots, cluster.num_slots) == (4, 4)  # engines share the actor's under --colocate


def test_fine_tuning_has_no_critic_whatever_the_estimator(flags):
    words = [*PPO, "--loss-type", "sft_loss", "--n-samples-per-prompt", "1"]
    assert parse_config(flags(*words)).cluster.num_slots == 1
    resolution = resolve(flags(*words, "--critic-lr", "1e-5"))
    assert resolution.violations == () and "--critic-lr" in resolution.warnings[-1]


def test_custom_advantages_need_the_same_samples_on_the_ranks_of_both(flags):
    path = ["--custom-advantage-function-path", "examples.plugins.losses:leave_one_out"]
    words = flags(*PPO, *path, "--global-batch-size", "8", "--n-samples-per-prompt", "8", "--rollout-batch-size", "1")
    assert said(words) == ()
    assert said([*words, "--critic-num-gpus-per-node", "2"]) == (
        "--custom-advantage-function-path must see the same samples on the ranks of actor and critic, which differ: "
        "data-parallel size 1 and 2",
    )


def test_slots_of_actor_critic_and_engines_add_up(flags):
    words = [word for word in flags(*PPO) if word != "--colocate"]
    cluster = parse_config([*words, "--critic-num-gpus-per-node", "4", "--rollout-num-gpus", "2"]).cluster
    assert cluster.num_slots == 1 + 4 + 2
    assert parse_config([*words, "--colocate-critic", "--rollout-num-gpus", "2"]).cluster.num_slots == 1 + 2


def test_without_ppo_there_is_no_critic(flags):
    config = parse_config(flags())
    assert (config.cluster.critic_world_size, config.cluster.num_slots) == (0, 1)
    assert not config.algorithm.needs_critic


def test_the_critic_learns_as_fast_as_the_actor_unless_told_otherwise(flags):
    assert critic_config(parse_config(flags(*PPO, "--lr", "2e-6"))).optimizer.lr == 2e-6
    config = parse_config(flags(*PPO, "--lr", "2e-6", "--critic-lr", "1e-5"))
    assert (config.optimizer.lr, critic_config(config).optimizer.lr) == (2e-6, 1e-5)


ROLES = """
megatron:
  - name: default
    role: actor
    overrides: {lr: 1e-6, clip-grad: 0.5}
  - name: default
    role: critic
    overrides:
      lr: 1e-5
      weight_decay: 0
      overlap-grad-reduce: true
      recompute-granularity: selective
"""


def test_a_file_says_what_differs_and_wins(flags, write):
    path = write(ROLES)
    words = flags(*PPO, "--lr", "3e-6", "--critic-lr", "4e-6", "--weight-decay", "0.1", "--megatron-config-path", path)
    config = parse_config(words)
    critic = critic_config(config)
    assert (config.optimizer.lr, critic.optimizer.lr) == (1e-6, 1e-5)
    assert (config.optimizer.clip_grad, critic.optimizer.clip_grad) == (0.5, 0.5)
    assert (config.optimizer.weight_decay, critic.optimizer.weight_decay) == (0.1, 0.0)
    assert critic.megatron["overlap_grad_reduce"] is True
    assert "overlap_grad_reduce" not in config.megatron
    assert (config.parallel.recompute_granularity, critic.parallel.recompute_granularity) == (None, "selective")
    assert config.origins["lr"] == f"{path} (actor)"
    assert config.origins["critic_lr"] == f"{path} (critic)"


def test_explain_shows_what_the_critic_alone_has(flags, write):
    path = write(ROLES)
    shown = parse_config(flags(*PPO, "--megatron-config-path", path)).to_dict()
    assert shown["critic"]["critic_lr"] == {"value": 1e-5, "origin": f"{path} (critic)"}
    assert shown["critic overrides"]["weight_decay"] == {"value": 0.0, "origin": path}
    assert "critic overrides" not in parse_config(flags(*PPO)).to_dict()


REFUSED = {
    "megatron: [{role: critic, overrides: {tensor-model-parallel-size: 2}}]": (
        " (critic): tensor-model-parallel-size cannot differ: actor and critic have the same parallel layout and "
        "precision"
    ),
    "megatron: [{role: actor, overrides: {num-layers: 3}}]": (
        " (actor): num-layers describes the model, which actor and critic share"
    ),
    "megatron: [{role: critic, overrides: {eps-clip: 0.1}}]": (
        " (critic): eps-clip is not a flag of one role: the optimizer's, recompute-*, load, save and Megatron's own are"
    ),
    "megatron: [{role: critic, overrides: {freeze-params-name-list: ['decoder', '[']}}]": (
        " (critic): freeze-params-name-list is of the actor alone: a critic is trained as a whole"
    ),
    "megatron: [{role: critic, overrides: {lrr: 1}}]": " (critic): unknown flag lrr; did you mean lr?",
    "megatron: [{role: critic, overrides: {lr: fast}}]": " (critic): lr expects a number, not 'fast'",
    "megatron: [{role: ref, overrides: {lr: 1}}]": ": role must be actor or critic, not 'ref'",
    "megatron: [{role: critic, overrides: {}}, {role: critic, overrides: {}}]": ": role critic stands there twice",
    "megatron: [{role: critic}]": (
        ": each entry of megatron has role, overrides and perhaps a name, not {'role': 'critic'}"
    ),
    "lr: 1e-6": ": expected one key, megatron, with a list of roles and their overrides",
    "megatron: [{role: critic, overrides: {min-lr: 1}}]": None,
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_a_file_that_is_wrong_is_refused_in_one_line(flags, write, text, message):
    path = write(text)
    expected = f"{path}{message}" if message else "critic: --min-lr 1 is above --lr 1e-06"
    assert said(flags(*PPO, "--megatron-config-path", path)) == (expected,)


RULES = {
    "--critic-lr 1e-5": "--critic-lr needs --advantage-estimator ppo: grpo has no critic",
    "--critic-num-nodes 2 --value-clip 0.1": (
        "--critic-num-nodes and --value-clip need --advantage-estimator ppo: grpo has no critic"
    ),
    "--advantage-estimator ppo --critic-num-gpus-per-node 3 --use-dynamic-batch-size --max-tokens-per-gpu 99": (
        "critic: --global-batch-size 32 must be a multiple of the 3 data-parallel ranks (3 training slots / 1)"
    ),
    "--advantage-estimator ppo --critic-num-gpus-per-node 9": (
        "--critic-num-gpus-per-node 9 is more than a node has (--num-gpus-per-node 8)"
    ),
    "--advantage-estimator ppo --colocate-critic --critic-num-gpus-per-node 2": (
        "--colocate-critic shares the actor's 1 slots: the critic cannot have 2 (leave --critic-num-nodes and "
        "--critic-num-gpus-per-node out)"
    ),
    "--advantage-estimator ppo --critic-load nowhere": (
        "--critic-load nowhere: neither a checkpoint (latest_checkpointed_iteration.txt) nor a Hugging Face folder "
        "(config.json)"
    ),
    "--advantage-estimator ppo --critic-num-nodes 0": "--critic-num-nodes must be at least 1, not 0",
    "--advantage-estimator ppo --value-clip -1": "--value-clip must be at least 0, not -1.0",
}


@pytest.mark.parametrize(("words", "message"), RULES.items())
def test_what_cannot_work_is_refused_in_one_line(flags, words, message):
    assert message in said(flags(*words.split()))


def test_a_critic_on_too_few_ranks_for_its_layout_is_refused(flags):
    words = "--tensor-model-parallel-size 2 --sequence-parallel --actor-num-gpus-per-node 2"
    assert said(flags(*PPO, *words.split(), "--critic-num-gpus-per-node", "1")) == (
        "critic: 1 training slots (--critic-num-nodes x --critic-num-gpus-per-node) must be a multiple of tensor x "
        "pipeline x context parallel size = 2",
    )


def test_checkpoints_of_both_go_to_folders_of_their_own(flags, tmp_path):
    save = tmp_path / "save"
    assert said(flags(*PPO, "--critic-save", str(save))) == (
        f"--critic-save {save} is --save itself: leave it out, checkpoints there have the critic too",
    )
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert said(flags(*PPO, "--critic-save", str(full))) == (
        f"--critic-save {full}: the folder is not empty; resume from it by --critic-load {full}, or give another one",
    )


def test_an_actor_that_never_learns_is_doubted(flags):
    assert resolve(flags(*PPO, "--num-critic-only-steps", "4")).warnings == (
        "--num-critic-only-steps 4 of 4 rollouts: the actor never learns",
    )
