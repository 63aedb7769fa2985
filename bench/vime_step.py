"""Whole GRPO steps of vime: generate, reward, train, sync. One step a request, as bench/protocol.py says.

    python -m bench.vime_step FLAGS

These are the processes and collaborators of `python train.py FLAGS`, Ray and all; only the loop around them waits for
requests.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack

from bench.protocol import SideChannel
from vime.cluster.job import Job
from vime.cluster.record import open_record
from vime.cluster.session import ray_session
from vime.config import Config, parse_config
from vime.rollout.build import load_prompts


async def serve(config: Config, channel: SideChannel) -> None:
    """Starts the job and answers each request with the seconds of one step and of its phases."""
    prompts = load_prompts(config)
    async with AsyncExitStack() as stack:
        record = stack.enter_context(open_record(config, total=prompts.num_rollout(config)))
        slots = stack.enter_context(ray_session(config.cluster.num_slots))
        job = Job(config, prompts, record, slots)
        stack.push_async_callback(job.stop)
        await job.start()
        job.rollouts.synced(await job.weights.sync(), 0)
        channel.reply(ready=True)
        requests = channel.requests()
        for rollout_id in itertools.count():
            if await asyncio.to_thread(next, requests, None) is None:
                return
            channel.reply(**await step(job, rollout_id))


async def step(job: Job, rollout_id: int) -> dict[str, float]:
    """One turn of ``vime.loop.train``, timed."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    batch = await job.rollouts.generate(rollout_id)
    generated = clock()
    await job.learner.train(batch)
    trained = clock()
    job.rollouts.synced(await job.weights.sync(), rollout_id + 1)
    synced = clock()
    return {
        "seconds": synced - begin,
        "generate": generated - begin,
        "train": trained - generated,
        "sync": synced - trained,
        "tokens": float(sum(sample.response_length for sample in batch.samples)),
    }


def main() -> None:
    channel = SideChannel()
    asyncio.run(serve(parse_config(sys.argv[1:]), channel))


if __name__ == "__main__":
    main()
