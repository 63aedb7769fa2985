"""GRPO steps with vime's training worker, in one process without Ray. One step a request.

    python -m bench.training.vime_side

The time is that of ``TrainWorker.train``: packing, advantages, forward and backward passes, metrics, the update.
"""

from __future__ import annotations

import time

from bench.protocol import SideChannel
from bench.work import TrainingWork, demo_config
from vime.config import Config
from vime.data.batching import make_train_batches
from vime.platform.sockets import free_port
from vime.training.worker import TrainWorker
from vime.types import RolloutBatch, TrainBatch, TrainSample


def make_worker(config: Config) -> TrainWorker:
    """The only rank, started."""
    worker = TrainWorker(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
    worker.start()
    return worker


def make_samples(work: TrainingWork) -> tuple[TrainSample, ...]:
    return tuple(
        TrainSample(
            index=index,
            group_index=index // work.group,
            tokens=tuple(tokens),
            response_length=work.response,
            loss_mask=(1,) * work.response,
            rollout_log_probs=(-1.0,) * work.response,
            weight_versions=(),
            raw_reward=float(advantage > 0),
            reward=advantage,
        )
        for index, (tokens, advantage) in enumerate(zip(work.token_ids(), work.advantages(), strict=True))
    )


def make_batch(work: TrainingWork, config: Config) -> TrainBatch:
    """All samples of the work, for one rank and one step."""
    (batch,) = make_train_batches(
        RolloutBatch(rollout_id=0, samples=make_samples(work)),
        dp_size=1,
        global_batch_size=work.samples,
        micro_batch_size=config.batch.micro_batch_size,
        use_dynamic_batch_size=config.batch.use_dynamic_batch_size,
        max_tokens_per_gpu=config.batch.max_tokens_per_gpu,
        balance_data=config.batch.balance_data,
        cp_size=1,
    )
    return batch


def main() -> None:
    channel = SideChannel()
    config = demo_config()
    worker = make_worker(config)
    channel.reply(ready=True)
    for request in channel.requests():
        batch = make_batch(TrainingWork.from_json(request), config)
        begin = time.perf_counter()
        result = worker.train(batch)
        channel.reply(
            seconds=time.perf_counter() - begin,
            grad_norm=result.steps[0]["train/grad_norm"],
            micro_batches=len(batch.steps[0].micro_batches),
        )
    worker.stop()


if __name__ == "__main__":
    main()
