"""One class a component of vime. The name of an attribute is the name of its flag, with underscores."""

from vime.config.sections.agent import Agent
from vime.config.sections.algorithm import Algorithm
from vime.config.sections.asynchrony import Asynchrony
from vime.config.sections.batch import Batch
from vime.config.sections.checkpoint import Checkpoint
from vime.config.sections.cluster import Cluster
from vime.config.sections.critic import Critic
from vime.config.sections.data import Data
from vime.config.sections.distillation import Distillation
from vime.config.sections.engine import Engine
from vime.config.sections.evaluation import Evaluation
from vime.config.sections.hooks import Hooks
from vime.config.sections.off_policy import OffPolicy
from vime.config.sections.ops import Ops
from vime.config.sections.optimizer import Optimizer
from vime.config.sections.parallel import Parallel
from vime.config.sections.reward import Reward
from vime.config.sections.rollout import Rollout
from vime.config.sections.sampling import Sampling

SECTIONS: dict[str, type] = {
    "cluster": Cluster,
    "checkpoint": Checkpoint,
    "data": Data,
    "rollout": Rollout,
    "sampling": Sampling,
    "batch": Batch,
    "algorithm": Algorithm,
    "critic": Critic,
    "asynchrony": Asynchrony,
    "off_policy": OffPolicy,
    "distillation": Distillation,
    "optimizer": Optimizer,
    "parallel": Parallel,
    "reward": Reward,
    "agent": Agent,
    "evaluation": Evaluation,
    "engine": Engine,
    "ops": Ops,
    "hooks": Hooks,
}
"""In the order in which ``vime explain`` shows them."""

__all__ = [
    "SECTIONS",
    "Agent",
    "Algorithm",
    "Asynchrony",
    "Batch",
    "Checkpoint",
    "Cluster",
    "Critic",
    "Data",
    "Distillation",
    "Engine",
    "Evaluation",
    "Hooks",
    "OffPolicy",
    "Ops",
    "Optimizer",
    "Parallel",
    "Reward",
    "Rollout",
    "Sampling",
]
