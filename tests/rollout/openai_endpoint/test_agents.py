"""Agents that are run for a sample, and what becomes of them. The engines are a fake (``ScriptedGenerator``)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest

from tests.data.templates import QWEN25, tokenizer_with
from tests.processes import children_with
from tests.rollout.multi_turn.scripted import ScriptedGenerator, turns
from tests.rollout.openai_endpoint.agents import PROGRAM, adder
from tests.rollout.openai_endpoint.test_sessions import ANSWER, CALL, trained
from vime.data.codec import check_sample
from vime.errors import UserError
from vime.observe.rollout_metrics import multi_turn_metrics
from vime.rollout.openai_endpoint import Endpoint, Speaker, agent_of, agents, command_agent, generate, play
from vime.rollout.openai_endpoint.server import check_address
from vime.sandbox import Limits, LocalSandbox
from vime.types import Sample, SamplingParams, Status

PARAMS = SamplingParams(max_tokens=400, seed=11)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(QWEN25)


def asked() -> Sample:
    return Sample(index=5, group_index=2, prompt="1 + 2?", label="It is 3.", session_id="42-5", metadata={"row": 7})


async def played(agent: Any, generator: Any, tokenizer: Any, **options: Any) -> list[Sample]:
    endpoint = Endpoint(Speaker(generator, tokenizer))
    sample, params = options.pop("sample", None) or asked(), options.pop("params", PARAMS)
    return await play(agent, endpoint, sample, params, **{"timeout_s": 20.0, "max_context": 2048, **options})


async def ask(task: Any, *messages: Any, retries: int = 0) -> str:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=retries) as client:
        said = list(messages) or [{"role": "user", "content": task.prompt}]
        return (await client.chat.completions.create(model=task.model, messages=said)).choices[0].message.content


async def test_what_an_agent_returns_is_the_reward_of_its_sample(tokenizer):
    generator = ScriptedGenerator(tokenizer, turns(CALL, ANSWER))
    (sample,) = await played(adder, generator, tokenizer)
    assert (sample.reward, sample.status, sample.index, sample.metadata["row"]) == (1.0, Status.COMPLETED, 5, 7)
    assert trained(sample) == [token for answer in generator.answers["42-5"] for token in answer.token_ids]
    assert multi_turn_metrics([sample])["rollout/multi_turn/turns/mean"] == 2


async def test_without_a_reward_the_sample_is_graded_like_any_other(tokenizer):
    async def agent(task: Any) -> dict[str, Any]:
        await ask(task)
        return {"metadata": {"tests": 3, "loss": math.nan}}

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert (sample.reward, sample.metadata["tests"], sample.response) == (None, 3, "It is 3.")
    assert sample.metadata["loss"] is None
    check_sample(sample)  # as the data source does with a sample that goes back to it


async def test_several_dialogues_are_several_samples_with_one_result(tokenizer):
    async def agent(task: Any) -> float:
        await asyncio.gather(
            ask(task), ask(task, {"role": "system", "content": "Plan."}, {"role": "user", "content": "x"})
        )
        return 0.5

    samples = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, kept="longest")
    assert sample.reward == 0.5


async def test_a_sample_that_is_sent_back_may_begin_otherwise_next_time(tokenizer):
    """Another first prompt (the agent writes the date into it), or one dialogue more."""
    calls = iter([["Monday"], ["Tuesday", "Wednesday"]])

    async def agent(task: Any) -> float:
        for day in next(calls):
            await ask(task, {"role": "user", "content": f"It is {day}. {task.prompt}"})
        return 1.0

    (first,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    again = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, sample=first.restarted())
    prompts = [tokenizer.decode(each.tokens[: each.prompt_length]) for each in (first, *again)]
    assert [re.findall("[A-Z][a-z]+day", prompt) for prompt in prompts] == [["Monday"], ["Tuesday"], ["Wednesday"]]


async def test_an_agent_that_is_not_done_in_time_leaves_what_it_has_as_truncated(tokenizer):
    async def agent(task: Any) -> None:
        await ask(task)
        await asyncio.sleep(60)

    start = time.monotonic()
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, timeout_s=5.0)
    assert time.monotonic() - start < 30
    assert (sample.status, tokenizer.decode(trained(sample))) == (Status.TRUNCATED, ANSWER)
    assert sample.metadata["multi_turn"]["failure"] == "not done within 5 s"


async def test_the_wait_for_a_place_in_the_sandbox_is_not_the_agents(tokenizer):
    sandbox = LocalSandbox(concurrency=1)
    await sandbox.isolation()
    other = asyncio.create_task(sandbox.run({}, ["sleep", "12"], limits=Limits(wall_s=60)))
    await asyncio.sleep(0.1)

    async def agent(task: Any) -> float:
        await ask(task)
        return float((await sandbox.run({}, ["true"])).ok)

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, timeout_s=10.0)
    assert other.done() and (sample.status, sample.reward) == (Status.COMPLETED, 1.0)


async def test_an_agent_that_fails_is_never_trained_on_and_says_why(tokenizer):
    async def agent(task: Any) -> None:
        await ask(task)
        raise KeyError("no such\nfile")

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert (sample.status, sample.response_length) == (Status.FAILED, 0)
    assert sample.metadata["multi_turn"]["failure"] == r"the agent failed: KeyError: 'no such\nfile'"
    assert multi_turn_metrics([sample])["rollout/multi_turn/turns/mean"] == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("good", "the reward must be a number, not 'good': an agent returns a reward, a dict or nothing"),
        (float("nan"), "the reward must be finite"),
        (10**400, "the reward must be finite"),
        ({"score": 1}, "has a reward and metadata"),
        ({"reward": "high"}, "the reward must be a number, not 'high'"),
        ({"reward": {"tests": 1.0}}, "the reward must be a number, not None: an agent returns a reward, a dict or "),
        ({"metadata": {"multi_turn": {}}}, "metadata (a dict without 'multi_turn')"),
        ({"metadata": {"open": [open]}}, "its result cannot be kept: metadata['open'][0] is of type builtin_function"),
        ({"metadata": {"n": 10**5000}}, "its result cannot be kept: metadata['n'] is an integer of 16610 bits"),
        ({"reward": {(1, 2): 3.0}}, "its result cannot be kept: reward has '(1, 2)' (tuple) as a key"),
    ],
)
async def test_a_result_that_is_none_is_a_failure(tokenizer, result, message):
    async def agent(task: Any) -> Any:
        await ask(task)
        return result

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert message in sample.metadata["multi_turn"]["failure"]


async def test_a_dict_may_be_the_reward_where_a_key_is_named(tokenizer):
    async def agent(task: Any) -> Any:
        await ask(task)
        return {"reward": {"tests": 0.5, "why": "one fails"}}

    script = turns(ANSWER)
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, script), tokenizer, reward_key="tests")
    assert sample.score("tests") == 0.5
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, script), tokenizer, reward_key="other")
    assert "'other' (--reward-key) of the dict" in sample.metadata["multi_turn"]["failure"]


def test_an_address_at_which_nobody_can_listen_is_found_before_the_first_sample():
    check_address("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            UserError, match=f"--agent-port {port}: the endpoint .* cannot listen there: Address already"
        ):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    for host in ("192.0.2.1", "h" * 300):
        with pytest.raises(
            UserError, match=f"--agent-host {host} --agent-port 0: the endpoint of agents cannot listen"
        ):
            check_address(host, 0)


async def test_an_agent_that_exits_fails_alone(tokenizer):
    async def agent(task: Any) -> None:
        sys.exit(3)

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert sample.metadata["multi_turn"]["failure"] == "the agent failed: it ended with exit(3)"


async def test_an_agent_that_never_asks_the_model_is_a_failure(tokenizer):
    async def agent(task: Any) -> float:
        return 1.0

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert sample.metadata["multi_turn"]["failure"] == "the agent failed: it never asked the model"


async def test_an_agent_that_gives_up_for_want_of_room_is_truncated_not_failed(tokenizer):
    async def agent(task: Any) -> None:
        answer = await ask(task)
        history = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": answer}]
        await ask(task, *history, {"role": "user", "content": "more " * 200})

    params = SamplingParams(max_tokens=60, seed=1)
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, params=params)
    assert (sample.status, tokenizer.decode(trained(sample))) == (Status.TRUNCATED, ANSWER)


async def test_when_generation_is_interrupted_the_agent_is_ended_and_the_sample_begins_anew(tokenizer):
    ended = asyncio.Event()

    async def agent(task: Any) -> None:
        try:
            while True:
                await ask(task, retries=5)
        finally:
            ended.set()

    generator = ScriptedGenerator(tokenizer, turns(ANSWER), aborts=[1])
    sample = asked()
    (same,) = await played(agent, generator, tokenizer, sample=sample)
    assert same is sample and ended.is_set()
    assert (sample.status, sample.tokens, sample.response_length) == (Status.ABORTED, [], 0)


async def test_engines_that_fail_are_not_the_agents_fault(tokenizer):
    class Dead(ScriptedGenerator):
        async def generate(self, token_ids: Any, params: Any, *, session_id: str) -> Any:
            raise ConnectionError("engine 0 is gone")

    with pytest.raises(ConnectionError, match="engine 0 is gone"):
        await played(adder, Dead(tokenizer, turns(ANSWER)), tokenizer)


async def test_what_an_agent_makes_of_engines_that_fail_is_no_result(tokenizer):
    async def agent(task: Any) -> float:
        for prompt in ("first", "second"):
            with contextlib.suppress(openai.APIError):
                await ask(task, {"role": "user", "content": prompt})
        return 0.0

    class Flaky(ScriptedGenerator):
        async def generate(self, token_ids: Any, params: Any, *, session_id: str) -> Any:
            if "first" in self._tokenizer.decode(token_ids):
                raise ConnectionError("engine 0 is gone")
            return await super().generate(token_ids, params, session_id=session_id)

    with pytest.raises(ConnectionError, match="engine 0 is gone"):
        await played(agent, Flaky(tokenizer, turns(ANSWER)), tokenizer)


async def test_an_agent_that_asks_again_is_not_troubled_by_an_engine_that_failed(tokenizer):
    class Flaky(ScriptedGenerator):
        failed = False

        async def generate(self, token_ids: Any, params: Any, *, session_id: str) -> Any:
            if not self.failed:
                self.failed = True
                raise ConnectionError("engine 0 is gone")
            return await super().generate(token_ids, params, session_id=session_id)

    async def agent(task: Any) -> float:
        await ask(task, retries=2)
        return 1.0

    (sample,) = await played(agent, Flaky(tokenizer, turns(ANSWER)), tokenizer)
    assert (sample.reward, sample.status) == (1.0, Status.COMPLETED)


async def test_an_agent_that_found_room_again_and_fails_later_is_failed_not_truncated(tokenizer):
    async def agent(task: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            await ask(task, {"role": "user", "content": "more " * 3000})
        await ask(task)
        raise KeyError("a bug")

    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert sample.status is Status.FAILED


def program(folder: Path, text: str) -> Any:
    path = folder / "agent.py"
    path.write_text(PROGRAM + text)
    return command_agent(f"{sys.executable} {path}")


@pytest.mark.parametrize("line", ['print("[" * 100_000)', 'print("{" * 10)', "print([])", "print(0)"])
async def test_a_last_line_that_is_no_result_is_none(tokenizer, tmp_path, line):
    (sample,) = await played(program(tmp_path, line), ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert (sample.reward, sample.status) == (None, Status.COMPLETED)


async def test_a_program_that_has_ended_is_done_though_what_it_started_holds_its_output(tokenizer, tmp_path):
    left = "sys.stdout.flush()\nimport subprocess\nsubprocess.Popen(['sleep', '31.7'], start_new_session={})"
    for away in (False, True):
        start = time.monotonic()
        agent = program(tmp_path, left.format(away))
        (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
        assert (sample.reward, sample.status) == (1.0, Status.COMPLETED)
        assert time.monotonic() - start < 15
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", "31.7"]:
            process.kill()


async def test_of_what_a_program_prints_only_the_end_is_kept(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "_TAIL_BYTES", 1000)
    kept: list[int] = []
    monkeypatch.setattr(agents, "_last_line", lambda out: kept.append(len(out)))
    agent = program(tmp_path, "for _ in range(1000): print('x' * 1000)")
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert (sample.status, kept) == (Status.COMPLETED, [1000])


async def test_a_program_that_does_not_read_its_task_is_an_agent_too(tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM.replace("json.load(sys.stdin)", "{'model': 'x', 'prompt': '?', 'label': ''}"))
    sample = asked()
    sample.metadata["large"] = "x" * 1_000_000
    agent = command_agent(f"{sys.executable} {path}")
    (sample,) = await played(agent, ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, sample=sample)
    assert sample.reward == 0.0


async def test_a_program_may_be_the_agent(tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    generator = ScriptedGenerator(tokenizer, turns(ANSWER))
    (sample,) = await played(command_agent(f"{sys.executable} {path}"), generator, tokenizer)
    assert (sample.reward, sample.metadata["said"], sample.metadata["row"]) == (1.0, "It is 3.", 7)
    assert trained(sample) == generator.answers["42-5"][0].token_ids


async def test_a_program_that_fails_or_hangs_is_ended_with_what_it_started(tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("import sys\nprint('broken', file=sys.stderr)\nsys.exit(2)")
    generator = ScriptedGenerator(tokenizer, turns(ANSWER))
    (sample,) = await played(command_agent(f"{sys.executable} {path}"), generator, tokenizer)
    assert sample.metadata["multi_turn"]["failure"] == f"the agent failed: {sys.executable} ended with status 2: broken"
    path.write_text(PROGRAM + "\nimport subprocess\nsubprocess.run(['sleep', '61.7'])")
    (sample,) = await played(command_agent(f"{sys.executable} {path}"), generator, tokenizer, timeout_s=10.0)
    assert sample.status is Status.TRUNCATED
    async with asyncio.timeout(20):
        while children_with("61.7"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_the_agent_of_the_page_works(tokenizer):
    page = Path(__file__).parents[3] / "docs/en/advanced/agents-by-api.md"
    found: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1], found)
    (sample,) = await played(found["solve"], ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
    assert (sample.reward, sample.status) == (1.0, Status.COMPLETED)


async def test_rollouts_and_evaluations_of_another_context_share_a_port_of_their_own(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    values: dict[str, Any] = {
        "agent_function_path": "tests.rollout.openai_endpoint.agents:adder",
        "agent_command": None,
    }
    values |= {"generator": ScriptedGenerator(tokenizer, turns(CALL, ANSWER)), "hf_checkpoint": str(tmp_path)}
    values |= {"trust_remote_code": False, "apply_chat_template_kwargs": {}, "rollout_skip_special_tokens": True}
    values |= {"agent_timeout_s": 30.0, "agent_samples": "all", "agent_sampling": "refuse", "agent_call_format": None}
    values |= {"agent_host": "127.0.0.1", "agent_port": port, "agent_advertise": None, "agent_max_transcripts": 64}
    values |= {"reward_key": None, "eval_reward_key": None}

    async def status(context: int, evaluation: bool) -> Status:
        args = SimpleNamespace(**values, max_context_tokens=context)
        return (await generate(args, asked(), {"max_tokens": 400}, evaluation))[0].status

    assert await asyncio.gather(status(2048, False), status(20, True)) == [Status.COMPLETED, Status.FAILED]


def test_a_run_needs_one_agent():
    with pytest.raises(UserError, match="needs one of --agent-function-path and --agent-command"):
        agent_of(None, None)
    with pytest.raises(UserError, match="has no ader; did you mean adder"):
        agent_of("tests.rollout.openai_endpoint.agents:ader", None)
