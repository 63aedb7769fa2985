"""What lets an engine on a CPU tell which experts its tokens were sent to, as one on a GPU does by itself.

vLLM 0.32 has all that is needed: routers that tell their choices, a store that keeps those of tokens whose keys and
values are in the prefix cache, and fields that carry them to the API server. But only its newer model runner, which
needs Triton, puts the parts together. The two classes here do it around the model runner of the CPU build. vLLM takes
them through ``--scheduler-cls`` and ``--worker-cls``, its doors for such classes.

Written for vLLM 0.32; ``tests/serving`` fails where a later version no longer fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

__all__ = ["RecordingScheduler", "RecordingWorker"]


class RecordingScheduler(Scheduler):  # type: ignore[misc]
    """Asks for the experts of every token that it schedules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.vllm_config.cache_config.enable_prefix_caching:  # vLLM's own guard looks at its own flag alone
            raise ValueError(
                "--use-rollout-routing-replay needs the prefix cache, which vLLM has turned off for this model"
            )
        self.aux_output_connector = AuxOutputSchedulerConnector()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The requests of one step, as the newer model runner describes them."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray[Any, Any]  # int32 [requests + 1], where the tokens of each one begin
    num_computed_tokens_np: np.ndarray[Any, Any]  # int32 [requests], before the step


class RecordingWorker(CPUWorker):  # type: ignore[misc]
    """Hands the experts of each step's tokens to the scheduler, together with the tokens that were sampled."""

    _connector: AuxOutputWorkerConnector | None = None  # none while the engine warms up
    _pending: PendingAuxOutput | None = None
    _drafted: dict[str, int]  # tokens of the step that nobody had sampled yet, by the request

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._connector = AuxOutputWorkerConnector(
            vllm_config=self.vllm_config, model=self.get_model(), kv_cache_config=kv_cache_config
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        assert self._connector is not None
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if output is None:  # else there were no tokens
            self._pending = self._connector.prepare_output(self._batch())
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self._drafted = {name: len(tokens) for name, tokens in drafts.items()}
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output: ModelRunnerOutput = super().sample_tokens(grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            sampled = [len(output.sampled_token_ids[output.req_id_to_index[name]]) for name in pending.request_ids]
            rejected = [
                self._drafted.get(name, 0) + 1 - count if count else 0
                for name, count in zip(pending.request_ids, sampled, strict=True)
            ]
            pending.enqueue_cpu_copy(np.array(sampled), np.array(rejected))
            output.aux_output_connector_output = pending.process_output()
        return output

    def shutdown(self) -> None:
        if self._connector is not None:
            self._connector.close()
        super().shutdown()

    def _batch(self) -> StepBatch:
        runner = self.model_runner
        count = runner.input_batch.num_reqs
        return StepBatch(
            list(runner.input_batch.req_ids[:count]),
            runner.query_start_loc.np[: count + 1].copy(),
            runner.input_batch.num_computed_tokens_cpu[:count].copy(),
        )
