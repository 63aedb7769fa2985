"""Episodes against engines that say what the test wants (``ScriptedGenerator``, a fake)."""

from __future__ import annotations

import asyncio
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.data.templates import CHATML, QWEN3, tokenizer_with
from tests.rollout.fakes import routes_of
from tests.rollout.multi_turn.scripted import ScriptedGenerator, turns
from vime.config import Args
from vime.data.codec import sample_from_json, sample_to_json
from vime.errors import UserError
from vime.observe.metrics import describe
from vime.observe.rollout_metrics import multi_turn_metrics
from vime.rollout.multi_turn import Environment, EpisodeFailed, Limits, MultiTurn, NotAppended, ToolFunction, Turn
from vime.rollout.runner import Gate
from vime.types import Generation, Message, Sample, SamplingParams, Status, derive_seed

PARAMS = SamplingParams(max_tokens=400, seed=11)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
ANSWER = "It is 3.<|im_end|>"


async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(CHATML)


def asked(prompt: str | list[Message] = "1 + 2?", **metadata: Any) -> Sample:
    return Sample(index=5, group_index=2, prompt=prompt, metadata=metadata, session_id="42-5")


async def play(generator: ScriptedGenerator, tokenizer: Any, sample: Sample | None = None, **limits: Any) -> Sample:
    context, params = limits.pop("max_context", 2048), limits.pop("params", PARAMS)
    player = MultiTurn(generator, tokenizer, max_context=context)
    return await player.with_tools(sample or asked(), params, [ToolFunction(add)], Limits(**limits))


def trained(sample: Sample) -> list[int]:
    response = sample.tokens[sample.prompt_length :]
    return [token for token, bit in zip(response, sample.loss_mask or (), strict=True) if bit]


async def test_an_episode_with_a_call_and_an_answer(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns(CALL, ANSWER))
    sample = await play(generator, tokenizer)
    assert tokenizer.decode(sample.tokens) == (
        f"<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n{CALL}\n"
        f"<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n{ANSWER}"
    )
    assert tokenizer.decode(trained(sample)) == CALL + ANSWER
    assert sample.status is Status.COMPLETED
    known = sample.metadata["multi_turn"]
    assert (known["tool_calls"], known["tool_errors"], known["answer"]) == (1, 0, "It is 3.")
    sample.validate()


async def test_every_request_continues_the_transcript_in_one_session_with_a_seed_of_its_own(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns(CALL, CALL, ANSWER))
    sample = await play(generator, tokenizer)
    assert list(generator.requests) == ["42-5"]
    requests = generator.requests["42-5"]
    assert all(sample.tokens[: len(given)] == given for given, _ in requests)
    assert [params.seed for _, params in requests] == [derive_seed(11, "turn", number) for number in range(3)]
    answers = generator.answers["42-5"]
    assert trained(sample) == [token for answer in answers for token in answer.token_ids]
    lengths = [len(answer.token_ids) for answer in answers]
    assert [stop - start for start, stop in sample.metadata["multi_turn"]["turns"]] == lengths


async def test_max_tokens_is_for_all_that_follows_the_prompt(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns(CALL))
    sample = await play(generator, tokenizer, params=replace(PARAMS, max_tokens=200))
    assert sample.status is Status.TRUNCATED and 150 < sample.response_length <= 200
    for given, params in generator.requests["42-5"]:
        assert len(given) - sample.prompt_length + params.max_tokens == 200


async def test_the_context_is_never_exceeded(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns(CALL))
    sample = await play(generator, tokenizer, max_context=150)
    assert sample.status is Status.TRUNCATED
    assert all(len(given) + params.max_tokens <= 150 for given, params in generator.requests["42-5"])


@pytest.mark.parametrize("room", [0, 1])
async def test_what_leaves_no_room_for_an_answer_is_not_appended(tokenizer: Any, room: int) -> None:
    first = len((await play(ScriptedGenerator(tokenizer, turns(CALL, ANSWER)), tokenizer)).tokens)
    answer = len(tokenizer.encode(ANSWER, add_special_tokens=False))
    context = first - answer + room  # what the tool says fits, with ``room`` tokens left
    sample = await play(ScriptedGenerator(tokenizer, turns(CALL, ANSWER)), tokenizer, max_context=context)
    assert sample.status is Status.TRUNCATED
    assert len(sample.metadata["multi_turn"]["turns"]) == 1 + room
    assert sample.loss_mask is not None and sample.loss_mask[-1] == 1


async def test_a_turn_that_runs_into_the_limit_of_the_response_is_the_last(tokenizer: Any) -> None:
    sample = await play(ScriptedGenerator(tokenizer, turns("1 2 3 " * 300)), tokenizer)
    assert sample.status is Status.TRUNCATED and sample.response_length == 400


async def test_turns_are_counted(tokenizer: Any) -> None:
    sample = await play(ScriptedGenerator(tokenizer, turns(CALL)), tokenizer, max_turns=3)
    assert sample.status is Status.TRUNCATED
    assert len(sample.metadata["multi_turn"]["turns"]) == sample.metadata["multi_turn"]["tool_calls"] == 3


async def test_tools_are_not_called_in_a_turn_after_which_nobody_would_hear_of_it(tokenizer: Any) -> None:
    """The last of ``max_turns``, and one that leaves no room for a further one."""
    calls: list[int] = []

    async def counts(n: int) -> int:
        calls.append(n)
        return n

    said = CALL.replace("add", "counts").replace('"a": 1, "b": 2', '"n": 7')
    length = len(tokenizer.encode(said, add_special_tokens=False))
    for turns_allowed, max_tokens, made in ((3, 400, 2), (16, length, 0)):
        calls.clear()
        generator = ScriptedGenerator(tokenizer, turns(said))
        player = MultiTurn(generator, tokenizer, max_context=2048)
        params, limits = replace(PARAMS, max_tokens=max_tokens), Limits(max_turns=turns_allowed)
        sample = await player.with_tools(asked(), params, [ToolFunction(counts)], limits)
        assert sample.status is Status.TRUNCATED and len(calls) == made
        assert sample.metadata["multi_turn"]["tool_calls"] == made + 1
        assert sample.metadata["multi_turn"]["tool_errors"] == 0


async def test_an_answer_in_the_last_turn_completes_the_episode(tokenizer: Any) -> None:
    sample = await play(ScriptedGenerator(tokenizer, turns(CALL, ANSWER)), tokenizer, max_turns=2)
    assert sample.status is Status.COMPLETED


async def test_a_turn_that_is_cut_off_by_its_own_limit_is_ended_for_the_model_and_answered(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns(CALL, ANSWER))
    sample = await play(generator, tokenizer, max_turn_tokens=20)
    text = tokenizer.decode(sample.tokens[sample.prompt_length :])
    assert "Error: the call is not valid JSON" in text and text.endswith(ANSWER)
    begin, stop = sample.metadata["multi_turn"]["turns"][0]
    assert (begin, stop) == (0, 20)
    assert sample.loss_mask is not None and sample.loss_mask[:21] == [1] * 20 + [0]
    assert tokenizer.decode(sample.tokens[sample.prompt_length + 20 :]).startswith("<|im_end|>\n<|im_start|>tool\n")


async def test_a_turn_without_calls_that_is_cut_off_is_truncated(tokenizer: Any) -> None:
    sample = await play(ScriptedGenerator(tokenizer, turns("1 2 3 " * 300)), tokenizer, max_turn_tokens=20)
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 20)


@pytest.mark.parametrize("after", [0, 5])
async def test_an_aborted_episode_goes_on_where_it_was(tokenizer: Any, after: int) -> None:
    """The rest of the interrupted turn is sampled, not the turn again."""
    spoken = tokenizer.encode(CALL, add_special_tokens=False)

    def script(text: str, number: int) -> str:
        if number == 0:
            return CALL
        return ANSWER if text.count("tool\n3") == 2 else rest(text)

    def rest(text: str) -> str:
        """What is missing of the second call."""
        begun = text.rpartition("<|im_start|>assistant\n")[2]
        return CALL.removeprefix(begun)

    generator = ScriptedGenerator(tokenizer, script, aborts=[1], abort_after=after)
    sample = await play(generator, tokenizer)
    assert sample.status is Status.ABORTED
    assert trained(sample) == spoken + spoken[:after]
    resumed = await play(generator, tokenizer, sample_from_json(sample_to_json(sample)))
    assert resumed.status is Status.COMPLETED
    assert resumed.tokens[: len(sample.tokens)] == sample.tokens
    assert tokenizer.decode(trained(resumed)) == CALL + CALL + ANSWER
    assert len(resumed.metadata["multi_turn"]["turns"]) == 3
    assert resumed.metadata["multi_turn"]["tool_calls"] == 2
    requests = [params.seed for _, params in generator.requests["42-5"]]
    assert requests == [derive_seed(11, "turn", number) for number in (0, 1, 1, 2)]


async def test_every_token_of_an_episode_is_routed_once_by_the_first_that_computed_it(tokenizer: Any) -> None:
    """Also what the tool said, and across an interruption; the engines are asked for no route twice."""
    generator = ScriptedGenerator(tokenizer, turns(CALL, CALL, CALL, ANSWER), aborts=[1])
    params = replace(PARAMS, routed_experts_prompt_start=0)
    player = MultiTurn(generator, tokenizer, max_context=2048)
    sample = await player.with_tools(asked(), params, [ToolFunction(add)])
    assert sample.status is Status.ABORTED
    sample = await player.with_tools(sample_from_json(sample_to_json(sample)), params, [ToolFunction(add)])
    assert sample.status is Status.COMPLETED
    found, length = [], 0
    rounds = zip(generator.requests["42-5"], generator.answers["42-5"], strict=True)
    for number, ((given, asked_for), answer) in enumerate(rounds):
        assert asked_for.routed_experts_prompt_start == max(length - 1, 0)
        known, length = max(length - 1, 0), len(given) + len(answer.token_ids)
        found.append(routes_of(sample.tokens[:length], number + 1)[known:-1])
    assert sample.rollout_routed_experts is not None
    assert np.array_equal(sample.rollout_routed_experts, np.concatenate(found))
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1


async def test_routes_of_other_tokens_are_reported_with_the_sample(tokenizer: Any) -> None:
    class Boastful(ScriptedGenerator):
        """Tells a route of the token that it sampled last, which nobody has computed."""

        async def generate(self, token_ids: Any, params: SamplingParams, *, session_id: str) -> Generation:
            said = await super().generate(token_ids, params, session_id=session_id)
            return replace(said, routed_experts=routes_of([*token_ids, *said.token_ids]))

    with pytest.raises(
        NotAppended, match=r"^sample 5 \(group 2.*: the routes of a generation are those of (\d+) tokens"
    ):
        await play(Boastful(tokenizer, turns(ANSWER)), tokenizer)


async def test_an_episode_whose_environment_remembers_begins_anew(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns(CALL, CALL, CALL, ANSWER), aborts=[1])
    player = MultiTurn(generator, tokenizer, max_context=2048)
    sample = await player.with_tools(asked(), PARAMS, [ToolFunction(add)], resumes=False)
    assert sample.status is Status.ABORTED
    sample = await player.with_tools(sample, PARAMS, [ToolFunction(add)], resumes=False)
    assert tokenizer.decode(trained(sample)) == CALL + ANSWER
    assert sample.metadata["multi_turn"]["tool_calls"] == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_episode_that_begins_anew_has_the_prompt_that_it_is_given_now(tokenizer: Any, restarted: bool) -> None:
    """Not that of another role, or of another day, which was sampled into the same sample before."""
    generator = ScriptedGenerator(tokenizer, turns(CALL, CALL, ANSWER), aborts=[1])
    player = MultiTurn(generator, tokenizer, max_context=2048)

    async def begins(sample: Sample, content: str) -> Sample:
        messages: list[Message] = [{"role": "user", "content": content}]
        tools = [ToolFunction(add)]
        return await player.with_tools(sample, PARAMS, tools, messages=messages, resumes=restarted)

    first = await begins(asked(), "Plan it.")
    assert first.status is Status.ABORTED
    again = await begins(first.restarted() if restarted else first, "Do it.")
    assert tokenizer.decode(again.tokens) == (f"<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n{ANSWER}")
    assert again.metadata["multi_turn"]["tool_calls"] == 0


async def test_no_further_turn_is_asked_for_while_generation_is_halted(tokenizer: Any) -> None:
    gate = Gate(ScriptedGenerator(tokenizer, turns(CALL, ANSWER)))

    async def shut(a: int, b: int) -> int:
        await gate.close()
        return a + b

    shut.__name__ = "add"
    player = MultiTurn(gate, tokenizer, max_context=2048)
    sample = await player.with_tools(asked(), PARAMS, [ToolFunction(shut)])
    assert sample.status is Status.ABORTED and "tool\n3" in sample.response
    gate.open()
    sample = await player.with_tools(sample, PARAMS, [ToolFunction(add)])
    assert sample.status is Status.COMPLETED and tokenizer.decode(trained(sample)) == CALL + ANSWER


async def test_a_broken_environment_fails_the_sample_and_names_the_reason(tokenizer: Any) -> None:
    async def down() -> str:
        raise EpisodeFailed("no sandbox answers")

    generator = ScriptedGenerator(tokenizer, turns('<tool_call>{"name": "down"}</tool_call><|im_end|>'))
    player = MultiTurn(generator, tokenizer, max_context=2048)
    sample = await player.with_tools(asked(), PARAMS, [ToolFunction(down)])
    assert sample.status is Status.FAILED and sample.metadata["multi_turn"]["failure"] == "no sandbox answers"


async def test_an_engine_that_fails_leaves_the_sample_as_it_was(tokenizer: Any) -> None:
    def script(text: str, number: int) -> str:
        if number:
            raise ConnectionError("engine 0 is gone")
        return CALL

    sample = asked()
    with pytest.raises(ConnectionError):
        await play(ScriptedGenerator(tokenizer, script), tokenizer, sample)
    assert sample == asked()
    begun = await play(ScriptedGenerator(tokenizer, turns(CALL), aborts=[1]), tokenizer)
    before = begun.copy()
    player = MultiTurn(ScriptedGenerator(tokenizer, script), tokenizer, max_context=2048)
    with pytest.raises(ConnectionError):
        await player.with_tools(begun, PARAMS, [ToolFunction(add)], resumes=False)
    assert begun == before


class Doubts(Environment):
    """Asks once whether the model is sure."""

    async def respond(self, turn: Turn) -> list[Message]:
        return [{"role": "user", "content": "Sure?"}] if turn.number == 0 else []


async def test_an_environment_need_not_be_tools(tokenizer: Any) -> None:
    generator = ScriptedGenerator(tokenizer, turns("4.<|im_end|>", "No: 3.<|im_end|>"))
    sample = await MultiTurn(generator, tokenizer, max_context=2048).run(asked(), PARAMS, Doubts())
    assert tokenizer.decode(sample.tokens[sample.prompt_length :]) == (
        "4.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nNo: 3.<|im_end|>"
    )
    assert "tool_calls" not in sample.metadata["multi_turn"]


async def test_reasoning_is_kept_in_the_transcript_and_out_of_calls_and_answers() -> None:
    tokenizer = tokenizer_with(QWEN3)
    said = [f"<think>\nhm {CALL[:-10]}</think>\n\n{CALL}", "<think>\nso</think>\n\nIt is 3.<|im_end|>"]
    sample = await play(ScriptedGenerator(tokenizer, turns(*said)), tokenizer)
    assert tokenizer.decode(trained(sample)) == "".join(said)
    assert sample.metadata["multi_turn"]["tool_calls"] == 1
    assert sample.metadata["multi_turn"]["answer"] == "It is 3."


SHOWS_TOOLS = "{%- if tools %}{{ 'Tools: ' + (tools | tojson) }}{%- endif %}" + CHATML


async def test_a_prompt_shows_the_tools_of_the_row_or_else_those_of_the_code() -> None:
    tokenizer = tokenizer_with(SHOWS_TOOLS)
    generator = ScriptedGenerator(tokenizer, turns(ANSWER))
    of_code = await play(generator, tokenizer, asked([{"role": "user", "content": "1 + 2?"}]))
    assert '"description": "Adds."' in tokenizer.decode(of_code.tokens)
    row = [{"type": "function", "function": {"name": "add", "description": "Sums."}}]
    of_row = await play(generator, tokenizer, asked("1 + 2?", tools=row))
    assert '"description": "Sums."' in tokenizer.decode(of_row.tokens)


async def test_a_row_chooses_tools_and_cannot_name_others(tokenizer: Any) -> None:
    wrong = ScriptedGenerator(tokenizer, turns(CALL.replace("add", "sub"), ANSWER))
    player = MultiTurn(wrong, tokenizer, max_context=2048)

    async def sub(a: int, b: int) -> int:
        return a - b

    both = [ToolFunction(add), ToolFunction(sub)]
    sample = await player.with_tools(asked(tools=[{"name": "add"}]), PARAMS, both)
    assert "Error: there is no tool 'sub', only add" in sample.response
    with pytest.raises(UserError, match=r"sample 5 .*: its metadata \(tools\) name the tool 'mul'; there are add, sub"):
        await player.with_tools(asked(tools='[{"name": "mul"}]'), PARAMS, both)
    for given in (["add"], [{"function": {}}], "add", {"add": 1}, 7):
        with pytest.raises(UserError, match=r"its metadata \(tools\) must be a list of tool definitions .*, not "):
            await player.with_tools(asked(tools=given), PARAMS, both)


async def test_a_prompt_that_was_rendered_is_taken_as_it_stands(tokenizer: Any) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    generator = ScriptedGenerator(tokenizer, turns(ANSWER))
    player = MultiTurn(generator, tokenizer, max_context=2048, rendered=True)
    sample = await player.with_tools(asked(text), PARAMS, [])
    assert tokenizer.decode(sample.tokens) == text + ANSWER


async def test_a_prompt_that_fills_the_context_fails_its_sample_alone(tokenizer: Any) -> None:
    """How long a prompt is with the tools of the code, no filter of rows knows."""
    generator = ScriptedGenerator(tokenizer, turns(ANSWER))
    sample = await play(generator, tokenizer, max_context=10)
    assert sample.status is Status.FAILED and generator.requests == {}
    assert sample.metadata["multi_turn"]["failure"] == "its prompt has 15 tokens, the context ends at 10"
    assert sample.tokens == [], "the trainer would make room for them"
    assert multi_turn_metrics([sample])["rollout/multi_turn/turns/mean"] == 0.0


async def test_a_generate_function_finds_all_it_needs_in_args(tokenizer: Any, tmp_path: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    args = Args(
        {
            "generator": ScriptedGenerator(tokenizer, turns(CALL, ANSWER)),
            "hf_checkpoint": str(tmp_path),
            "trust_remote_code": False,
            "max_context_tokens": 2048,
            "apply_chat_template": False,
            "apply_chat_template_kwargs": types.MappingProxyType({"enable_thinking": False}),
            "tool_key": "tools",
            "rollout_skip_special_tokens": True,
        }
    )
    player = MultiTurn.from_args(args)
    assert MultiTurn.from_args(args) is player, "templates are probed once"
    params = {"max_tokens": 400, "temperature": 0.5, "stop": [], "stop_token_ids": [], "seed": 1}
    sample = await player.with_tools(asked(), params, [ToolFunction(add)])
    assert sample.status is Status.COMPLETED and "<|im_end|>" not in sample.response


async def test_metrics_of_episodes(tokenizer: Any) -> None:
    bad = "<tool_call>?</tool_call><|im_end|>"
    scripts = [turns(CALL, bad, ANSWER), turns(ANSWER)]
    played = [await play(ScriptedGenerator(tokenizer, script), tokenizer) for script in scripts]
    metrics = multi_turn_metrics([*played, Sample(index=9)])
    assert metrics["rollout/multi_turn/turns/mean"] == 2.0  # 3 and 1
    assert metrics["rollout/multi_turn/turns/max"] == 3.0
    assert metrics["rollout/multi_turn/tool_calls/mean"] == 1.0  # 2 and none
    assert metrics["rollout/multi_turn/tool_error_ratio"] == 0.5
    assert metrics["rollout/multi_turn/tool_timeouts"] == 0.0
    said = sum(len(trained(sample)) for sample in played)
    expected = said / sum(sample.response_length for sample in played)
    assert metrics["rollout/multi_turn/sampled_ratio"] == pytest.approx(expected)
    assert all(describe(name) for name in metrics)
    columns = [Sample(index=9, metadata={"multi_turn": column}) for column in (True, {"turns": 3}, {})]
    assert multi_turn_metrics([Sample(index=9), *columns]) == {}


async def test_episodes_do_not_meet(tokenizer: Any) -> None:
    """64 at once: each has its own session, transcript and calls."""

    def script(text: str, number: int) -> str:
        asked = text.partition("user\n")[2].partition(" +")[0]
        return ANSWER if number == 7 else CALL.replace('"a": 1', f'"a": {asked}')

    generator = ScriptedGenerator(tokenizer, script)
    player = MultiTurn(generator, tokenizer, max_context=2048)
    params = replace(PARAMS, max_tokens=2000)
    samples = [Sample(index=i, group_index=i, prompt=f"{i} + 2?", session_id=f"s{i}") for i in range(64)]
    await asyncio.gather(*(player.with_tools(sample, params, [ToolFunction(add)]) for sample in samples))
    for i, sample in enumerate(samples):
        assert sample.response.count(f"tool\n{i + 2}\n") == 7
        assert trained(sample) == [token for answer in generator.answers[f"s{i}"] for token in answer.token_ids]
