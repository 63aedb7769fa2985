"""What is recorded of an agent's requests, through the real HTTP server and OpenAI's own client. The engines are a fake
(``ScriptedGenerator``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from tests.data.templates import CHATML, QWEN3, QWEN25, tokenizer_with
from tests.rollout.fakes import routes_of
from tests.rollout.multi_turn.scripted import ScriptedGenerator, turns
from vime.errors import UserError
from vime.rollout.multi_turn import TurnTemplate
from vime.rollout.openai_endpoint import Endpoint, Session, Speaker
from vime.rollout.runner import Gate
from vime.types import Sample, SamplingParams, Status, derive_seed

PARAMS = SamplingParams(max_tokens=400, temperature=0.8, seed=11)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
ANSWER = "It is 3.<|im_end|>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ASKED = [{"role": "user", "content": "1 + 2?"}]
RESULT = {"role": "tool", "tool_call_id": "000000000", "content": "3"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(QWEN25)


class Client:
    """An open session, and clients of it."""

    def __init__(self, endpoint: Endpoint, session: Session) -> None:
        self.url = endpoint.base_url(session)
        self.session = session
        self.openai = openai.AsyncOpenAI(base_url=self.url, api_key="any", max_retries=0)

    async def ask(self, messages: list[Any], **wanted: Any) -> Any:
        return await self.openai.chat.completions.create(model="any", messages=messages, **wanted)

    async def post(self, body: Any, **options: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/chat/completions", json=body, **options) as answer,
        ):
            return answer.status, await answer.json()

    def samples(self, kept: Any = "all") -> list[Sample]:
        return self.session.samples(Sample(index=5, group_index=2, prompt="1 + 2?"), kept)


@contextlib.asynccontextmanager
async def serving(generator: Any, tokenizer: Any, params: SamplingParams = PARAMS, **options: Any) -> Any:
    context = options.pop("max_context", 2048)
    most = options.pop("max_transcripts", 64)
    speaker = Speaker(generator, tokenizer, call_format=options.pop("call_format", None))
    endpoint = Endpoint(speaker, **options)
    async with endpoint.session(params, "42-5", max_context=context, max_transcripts=most) as session:
        client = Client(endpoint, session)
        async with client.openai:
            yield client


def trained(sample: Sample) -> list[int]:
    response = sample.tokens[sample.prompt_length :]
    return [token for token, bit in zip(response, sample.loss_mask or (), strict=True) if bit]


async def test_a_dialogue_with_a_tool_is_one_sample_whose_trained_tokens_are_those_that_were_sampled(tokenizer):
    generator = ScriptedGenerator(tokenizer, turns(CALL, ANSWER))
    async with serving(generator, tokenizer) as client:
        first = (await client.ask(ASKED, tools=[ADD])).choices[0]
        history = [*ASKED, first.message.model_dump(exclude_none=True), RESULT]
        second = (await client.ask(history, tools=[ADD])).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    call = first.message.tool_calls[0]
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("000000000", "add", {"a": 1, "b": 2})
    assert (second.finish_reason, second.message.content) == ("stop", "It is 3.")
    (sample,) = client.samples()
    sampled = [token for answer in generator.answers["42-5"] for token in answer.token_ids]
    assert trained(sample) == sampled
    assert tokenizer.decode(sample.tokens[sample.prompt_length :]) == (
        f"{CALL}\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n{ANSWER}"
    )
    assert '"name": "add"' in tokenizer.decode(sample.tokens[: sample.prompt_length])
    first_length = len(generator.answers["42-5"][0].token_ids)
    assert sample.rollout_log_probs[:first_length] == [-0.5] * first_length
    assert sample.weight_versions[0] == 1 and sample.weight_versions[-1] == 2
    assert (sample.status, sample.metadata["multi_turn"]["answer"]) == (Status.COMPLETED, "It is 3.")
    sample.reward = 1.0
    sample.validate()


async def test_every_token_of_a_dialogue_is_routed_once(tokenizer):
    """Another dialogue, which begins with what was said in the first one, is routed by itself."""
    generator = ScriptedGenerator(tokenizer, turns(CALL, ANSWER))
    async with serving(generator, tokenizer, replace(PARAMS, routed_experts_prompt_start=0)) as client:
        first = (await client.ask(ASKED, tools=[ADD])).choices[0]
        history = [*ASKED, first.message.model_dump(exclude_none=True)]
        await client.ask([*history, RESULT], tools=[ADD])
        await client.ask([*history, RESULT | {"content": "four"}], tools=[ADD])
    begun = len(generator.requests["42-5"][0][0]) + len(generator.answers["42-5"][0].token_ids) - 1
    assert [params.routed_experts_prompt_start for _, params in generator.requests["42-5"]] == [0, begun, 0]
    one, other = client.samples()
    expected = [routes_of(one.tokens, 1)[:begun], routes_of(one.tokens, 2)[begun:-1]]
    assert np.array_equal(one.rollout_routed_experts, np.concatenate(expected))
    assert np.array_equal(other.rollout_routed_experts, routes_of(other.tokens, 3)[:-1])


async def test_the_engine_continues_exactly_what_it_sampled_and_each_turn_has_a_seed_of_its_own(tokenizer):
    generator = ScriptedGenerator(tokenizer, turns(CALL, ANSWER))
    async with serving(generator, tokenizer) as client:
        first = (await client.ask(ASKED, tools=[ADD])).choices[0]
        await client.ask([*ASKED, first.message.model_dump(exclude_none=True), RESULT], tools=[ADD])
    (prompt, one), (given, two) = generator.requests["42-5"]
    assert given[: len(prompt)] == prompt
    assert given[len(prompt) :][: len(generator.answers["42-5"][0].token_ids)] == generator.answers["42-5"][0].token_ids
    assert one.seed == derive_seed(11, "dialogue", 0, "turn", 0)
    assert two.seed == derive_seed(11, "dialogue", 0, "turn", 1)
    assert (one.temperature, one.max_tokens) == (0.8, 400)
    assert two.max_tokens == 400 - (len(given) - len(prompt))


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "It is 3."},
        {"role": "assistant", "content": " It is 3.\n", "refusal": None, "tool_calls": None, "reasoning_content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 3."}]},
    ],
)
async def test_clients_may_write_an_answer_in_other_ways_when_they_send_it_back(tokenizer, echo):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        await client.ask(ASKED)
        await client.ask([*ASKED, echo, {"role": "user", "content": "Sure?"}])
    (sample,) = client.samples()
    assert len(sample.metadata["multi_turn"]["turns"]) == 2


async def test_reasoning_stays_in_the_transcript_though_the_client_never_sends_it_back():
    tokenizer = tokenizer_with(QWEN3)
    thought = "<think>\nOne and two.\n</think>\n\nIt is 3.<|im_end|>"
    async with serving(ScriptedGenerator(tokenizer, turns(thought)), tokenizer) as client:
        answer = (await client.ask(ASKED)).choices[0].message
        await client.ask(
            [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
        )
    assert (answer.content, answer.reasoning_content) == ("It is 3.", "One and two.")
    (sample,) = client.samples()
    assert tokenizer.decode(trained(sample)) == thought + thought


async def test_a_history_that_the_agent_edited_is_another_transcript(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        await client.ask(ASKED)
        await client.ask([*ASKED, {"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}])
        await client.ask([{"role": "system", "content": "Be brief."}, *ASKED])
    samples = client.samples()
    assert [len(sample.metadata["multi_turn"]["turns"]) for sample in samples] == [1, 1, 1]
    assert "It is 4." in tokenizer.decode(samples[1].tokens[: samples[1].prompt_length])  # not trained
    assert [tokenizer.decode(trained(sample)) for sample in samples] == [ANSWER] * 3
    assert [sample.metadata["multi_turn"]["dialogue"] for sample in samples] == [0, 1, 2]


async def test_dialogues_side_by_side_do_not_mix(tokenizer):
    def script(text: str, number: int) -> str:
        return f"You are {text.rpartition('I am ')[2][0]}.<|im_end|>"

    async def talk(client: Client, name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am {name}"}]
        for _ in range(3):
            answer = (await client.ask(messages)).choices[0].message
            assert answer.content == f"You are {name}."
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "Again?"}]

    async with serving(ScriptedGenerator(tokenizer, script), tokenizer) as client:
        await asyncio.gather(*(talk(client, name) for name in "ABCD"))
    samples = client.samples()
    assert len(samples) == 4
    said = sorted(tokenizer.decode(trained(sample)) for sample in samples)
    assert said == [f"You are {name}.<|im_end|>" * 3 for name in "ABCD"]


async def test_two_requests_that_go_on_from_the_same_place_at_once_are_two_transcripts(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        answer = (await client.ask(ASKED)).choices[0].message.model_dump(exclude_none=True)
        more = [*ASKED, answer, {"role": "user", "content": "Sure?"}]
        await asyncio.gather(client.ask(more), client.ask(more))
    assert sorted(len(sample.metadata["multi_turn"]["turns"]) for sample in client.samples()) == [1, 2]


async def test_the_longest_transcript_may_be_all_that_is_kept(tokenizer):
    async with serving(
        ScriptedGenerator(tokenizer, turns("No.<|im_end|>", "It is three.<|im_end|>")), tokenizer
    ) as client:
        await client.ask(ASKED)
        await client.ask([{"role": "user", "content": "Other"}])
    (sample,) = client.samples("longest")
    assert sample.metadata["multi_turn"]["dialogue"] == 1


async def test_an_answer_may_be_streamed(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns("Adding. " + CALL)), tokenizer) as client:
        options = {"include_usage": True}
        stream = await client.ask(ASKED, tools=[ADD], stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Adding."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add")]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(trained(client.samples()[0]))


async def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(tokenizer):
    generator = ScriptedGenerator(tokenizer, turns("It is 3. STOP"))
    async with serving(generator, tokenizer) as client:
        answer = (await client.ask(ASKED, stop=["STOP"])).choices[0]
        await client.ask([*ASKED, {"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "Sure?"}])
    assert (answer.message.content, answer.finish_reason) == ("It is 3.", "stop")
    assert generator.requests["42-5"][0][1].stop == ("STOP",)
    (sample,) = client.samples()
    assert "STOP<|im_end|>\n<|im_start|>user\nSure?" in tokenizer.decode(sample.tokens)


async def test_a_call_that_cannot_be_read_stays_text(tokenizer):
    bad = '<tool_call>{"name": "add", </tool_call><|im_end|>'
    async with serving(ScriptedGenerator(tokenizer, turns(bad)), tokenizer) as client:
        answer = (await client.ask(ASKED, tools=[ADD])).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content == '<tool_call>{"name": "add", </tool_call>'


async def test_the_arguments_of_a_call_may_be_nothing_that_json_can_hold(tokenizer):
    """The client makes a failed request again, and the model is asked for another answer: both would be trained."""
    script = turns("<|python_tag|>add.call(a={1})<|im_end|>", ANSWER)
    generator = ScriptedGenerator(tokenizer, script)
    async with serving(generator, tokenizer, call_format="llama3") as client:
        answer = (await client.ask(ASKED, tools=[ADD])).choices[0].message
        assert (answer.content, answer.tool_calls) == ("<|python_tag|>add.call(a={1})", None)
        await client.ask([*ASKED, answer.model_dump(exclude_none=True), {"role": "user", "content": "?"}], tools=[ADD])
    (sample,) = client.samples()
    assert trained(sample) == [token for answer in generator.answers["42-5"] for token in answer.token_ids]
    assert tokenizer.decode(sample.tokens).count("1 + 2?") == 1


@pytest.mark.parametrize("number", ["1e999", "[" * 400 + "]" * 400])
async def test_nothing_that_the_model_writes_makes_a_request_fail(tokenizer, number):
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call><|im_end|>'
    async with serving(ScriptedGenerator(tokenizer, turns(call)), tokenizer, max_context=9000) as client:
        await client.ask(ASKED, tools=[ADD])
    assert len(client.samples()) == 1


@pytest.mark.parametrize(
    "schema", [{"properties": None}, {"required": None}, {"properties": {"a": 5, "b": {"enum": 3}}}]
)
async def test_a_tool_may_have_any_schema(tokenizer, schema):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", **schema}}}
    async with serving(ScriptedGenerator(tokenizer, turns(CALL)), tokenizer) as client:
        (call,) = (await client.ask(ASKED, tools=[tool])).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_in_a_call_is_replaced_because_no_client_can_send_it_back(tokenizer, stream):
    call = r'<tool_call>{"name": "add\ud83d", "arguments": {"a": "x\ud83d"}, "id": "\ud83d"}</tool_call><|im_end|>'
    async with serving(ScriptedGenerator(tokenizer, turns(call)), tokenizer) as client:
        if stream:
            chunks = [chunk async for chunk in await client.ask(ASKED, tools=[ADD], stream=True)]
            (made,) = next(deltas for chunk in chunks if (deltas := chunk.choices[0].delta.tool_calls))
        else:
            answer = (await client.ask(ASKED, tools=[ADD])).choices[0].message
            (made,) = answer.tool_calls
            await client.ask([*ASKED, answer.model_dump(exclude_none=True), RESULT], tools=[ADD])
    assert (made.id, made.function.name, made.function.arguments) == ("000000000", "add?", '{"a": "x?"}')
    assert len(client.samples()) == 1


async def test_half_a_character_in_a_request_is_replaced(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        assert (await client.post({"messages": [{"role": "user", "content": "1 \ud83d 2"}]}))[0] == 200
    assert "1 ? 2" in tokenizer.decode(client.samples()[0].tokens)


async def test_a_failure_of_ours_is_told_as_the_api_tells_errors(tokenizer, monkeypatch):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        monkeypatch.setattr(client.session, "chat", lambda request: 1 / 0)
        status, answer = await client.post({"messages": ASKED})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert answer["error"]["message"] == "ZeroDivisionError: division by zero"


async def test_an_engine_that_answers_nothing_has_failed_and_nothing_is_recorded(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER, "", ANSWER)), tokenizer) as client:
        answer = (await client.ask(ASKED)).choices[0].message.model_dump(exclude_none=True)
        more = [*ASKED, answer, {"role": "user", "content": "Sure?"}]
        with pytest.raises(openai.InternalServerError, match="answered without a token"):
            await client.ask(more)
        await client.ask(more)
    (sample,) = client.samples()
    assert tokenizer.decode(trained(sample)) == ANSWER * 2


async def test_a_call_that_nobody_offered_stays_text(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(CALL)), tokenizer) as client:
        answers = [
            (await client.ask(ASKED)).choices[0],
            (await client.ask(ASKED, tools=[ADD], tool_choice="none")).choices[0],
        ]
    assert [answer.finish_reason for answer in answers] == ["stop", "stop"]
    assert answers[0].message.content == CALL.removesuffix("<|im_end|>")


async def test_without_room_for_an_answer_the_agent_is_told_as_openai_does_and_the_sample_is_truncated(tokenizer):
    params = SamplingParams(max_tokens=30, temperature=0.8)
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, params) as client:
        answer = (await client.ask(ASKED)).choices[0].message.model_dump(exclude_none=True)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.ask([*ASKED, answer, {"role": "user", "content": "Tell me more. " * 20}])
    assert refused.value.code == "context_length_exceeded"
    assert "there is no room for an answer" in str(refused.value)
    (sample,) = client.samples()
    assert sample.status is Status.TRUNCATED and tokenizer.decode(trained(sample)) == ANSWER


async def test_what_cannot_have_room_is_refused_without_being_encoded(tokenizer, monkeypatch):
    """A second for each megabyte, for which the driver would stand still."""

    def never(*_: Any) -> Any:
        raise AssertionError("it was encoded")

    large = {"role": "user", "content": "long " * 200_000}
    generator = ScriptedGenerator(tokenizer, turns(ANSWER, ANSWER))
    async with serving(generator, tokenizer) as client:
        first = (await client.ask(ASKED)).choices[0].message.model_dump(exclude_none=True)
        monkeypatch.setattr(Speaker, "_encode", never)
        monkeypatch.setattr(TurnTemplate, "encoded_behind", never)
        for messages in ([large], [*ASKED, first, large], [large, large]):  # the last one is too large a body
            with pytest.raises(openai.BadRequestError, match="there is no room for an answer") as refused:
                await client.ask(messages)
            assert refused.value.code == "context_length_exceeded"
            assert client.session.is_full
    (sample,) = client.samples()
    assert sample.status is Status.TRUNCATED


async def test_large_texts_are_encoded_in_threads_and_are_what_they_would_be(tokenizer, monkeypatch):
    places: list[tuple[str, bool]] = []
    encode, behind = Speaker._encode, TurnTemplate.encoded_behind

    def noted(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            places.append((name, threading.current_thread() is threading.main_thread()))
            return function(*given)

        return call

    monkeypatch.setattr(Speaker, "_encode", noted("prompt", encode))
    monkeypatch.setattr(TurnTemplate, "encoded_behind", noted("between", behind))
    large = {"role": "user", "content": "long " * 10_000}
    params = replace(PARAMS, max_tokens=200_000)
    async with serving(
        ScriptedGenerator(tokenizer, turns(ANSWER, ANSWER)), tokenizer, params, max_context=400_000
    ) as it:
        places.clear()
        first = (await it.ask([large])).choices[0].message.model_dump(exclude_none=True)
        await it.ask([large, first, large])
    assert places == [("prompt", False), ("between", False)]
    (sample,) = it.samples()
    text = tokenizer.decode(sample.tokens)
    assert (text.count("long "), text.count("<|im_start|>user")) == (20_000, 2)


async def test_two_large_requests_at_once_count_as_transcripts_while_they_are_encoded(tokenizer):
    large = [{"role": "user", "content": "long " * 10_000}]
    generator = ScriptedGenerator(tokenizer, turns(ANSWER, ANSWER))
    async with serving(generator, tokenizer, max_context=400_000, max_transcripts=1) as client:
        answers = await asyncio.gather(client.ask(large), client.ask(large), return_exceptions=True)
    refused = [each for each in answers if isinstance(each, openai.BadRequestError)]
    assert [each.code for each in refused] == ["too_many_transcripts"]
    assert len(client.samples()) == 1


async def test_a_list_of_bad_calls_is_said_once(tokenizer):
    """Each of its elements is a bad call whose text is the whole list: 30 MB for 4,000 of them."""
    said = f'<tool_call>[{{"name": "add", "arguments": {{}}}}{", 1" * 50}]</tool_call>'
    async with serving(ScriptedGenerator(tokenizer, turns(f"{said}<|im_end|>")), tokenizer) as client:
        message = (await client.ask(ASKED, tools=[ADD])).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["add"]
    assert len(message.content) <= len(said)


async def test_an_answer_that_was_cut_off_says_so(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        answer = (await client.ask(ASKED, max_completion_tokens=2)).choices[0]
    assert answer.finish_reason == "length"
    assert client.samples()[0].status is Status.TRUNCATED


async def test_a_request_that_fails_leaves_nothing_and_may_be_made_again(tokenizer):
    class Flaky(ScriptedGenerator):
        async def generate(self, token_ids: Any, params: Any, *, session_id: str) -> Any:
            if len(self.requests.get(session_id, ())) == 1 and not hasattr(self, "failed"):
                self.failed = True
                raise RuntimeError("no engine answers")
            return await super().generate(token_ids, params, session_id=session_id)

    async with serving(Flaky(tokenizer, turns(ANSWER)), tokenizer) as client:
        answer = (await client.ask(ASKED)).choices[0].message.model_dump(exclude_none=True)
        more = [*ASKED, answer, {"role": "user", "content": "Sure?"}]
        with pytest.raises(openai.APIStatusError, match="the engines failed: no engine answers") as failed:
            await client.ask(more)
        assert (failed.value.status_code, str(client.session.failure)) == (502, "no engine answers")
        await client.ask(more)
    assert client.session.failure is None
    (sample,) = client.samples()
    assert tokenizer.decode(trained(sample)) == ANSWER * 2


async def test_who_hangs_up_is_not_recorded(tokenizer):
    entered = asyncio.Event()

    class Slow(ScriptedGenerator):
        async def generate(self, token_ids: Any, params: Any, *, session_id: str) -> Any:
            entered.set()
            await asyncio.sleep(0.3)
            return await super().generate(token_ids, params, session_id=session_id)

    async with serving(Slow(tokenizer, turns(ANSWER)), tokenizer) as client:
        asking = asyncio.create_task(client.ask(ASKED))
        await entered.wait()
        asking.cancel()
        await asyncio.sleep(0.5)
        assert client.samples() == []
        await client.ask(ASKED)
        assert len(client.samples()) == 1


async def test_an_abort_interrupts_the_session_and_is_not_recorded(tokenizer):
    gate = Gate(ScriptedGenerator(tokenizer, turns(ANSWER)))
    await gate.close()
    async with serving(gate, tokenizer) as client:
        with pytest.raises(openai.InternalServerError, match="generation was interrupted"):
            await client.ask(ASKED)
    assert client.session.interrupted.is_set() and client.samples() == []


async def test_models_and_the_session_as_an_api_key(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        root = client.url.partition("/session/")[0] + "/v1"
        async with openai.AsyncOpenAI(base_url=root, api_key=client.session.id, max_retries=0) as by_key:
            models = [model.id async for model in by_key.models.list()]
            await by_key.chat.completions.create(model="vime", messages=ASKED)
        async with openai.AsyncOpenAI(base_url=root, api_key="other", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError, match="there is no such session"):
                await stranger.chat.completions.create(model="vime", messages=ASKED)
    assert models == ["vime"]
    assert len(client.samples()) == 1


async def test_a_session_has_so_many_transcripts_at_most(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, max_transcripts=3) as client:
        said = [(await client.ask(ASKED)).choices[0].message for _ in range(2)]
        answers = await asyncio.gather(*(client.ask(ASKED) for _ in range(5)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, openai.BadRequestError)]
        assert {answer.code for answer in refused} == {"too_many_transcripts"}
        await client.ask([*ASKED, said[0].model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}])
    assert (len(refused), len(client.samples())) == (4, 3)


async def test_where_all_addresses_are_listened_at_agents_are_told_one_that_is_reached(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, host="0.0.0.0") as client:
        assert "//0.0.0.0:" not in client.url
        await client.ask(ASKED)
    options = {"host": "0.0.0.0", "advertise": "gateway.example"}
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer, **options) as client:
        assert client.url.startswith("http://gateway.example:")


async def test_the_server_is_there_while_a_session_is_open(tokenizer):
    endpoint = Endpoint(Speaker(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer))
    async with endpoint.session(PARAMS, "a", max_context=512) as one:
        async with endpoint.session(PARAMS, "b", max_context=64) as two:
            url = endpoint.base_url(one)
            assert url.rpartition("/session/")[0] == endpoint.base_url(two).rpartition("/session/")[0]
        async with aiohttp.ClientSession() as http:
            assert (await http.get(f"{url}/models")).status == 200
            assert (await http.get(f"{endpoint.base_url(two)}/models")).status == 401
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(f"{url}/models")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"temperature": 0.7}, "temperature 0.7: this run samples with temperature 0.8"),
        ({"temperature": True}, "temperature true: this run samples"),
        ({"top_p": 0.9}, "top_p 0.9: this run samples with top_p 1"),
        ({"n": 2}, "n 2 is not offered here: leave it out or give 1"),
        ({"logprobs": True}, "logprobs true is not offered here"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty 0.5 is not offered here"),
        ({"tool_choice": "required"}, 'tool_choice "required" is not offered here: give auto or none'),
        ({"tools": [{"type": "web"}]}, "tools must be a list of functions"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"stop": [1]}, "stop must be a text"),
        ({"best_of": 3}, "the field best_of is unknown here"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}, *ASKED]}, "messages[0].tool_calls must be a list"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "if any, a schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be a text, or parts of type text"),
    ],
)
async def test_what_is_not_offered_is_refused_in_one_line(tokenizer, field, message):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        status, answer = await client.post({"model": "any", "messages": ASKED, **field})
    assert status == 400
    assert message in answer["error"]["message"] and "\n" not in answer["error"]["message"]


async def test_what_changes_nothing_is_taken(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        neutral = {"temperature": 0.8, "top_p": 1, "n": 1, "seed": 3, "user": "me", "logit_bias": None, "tools": []}
        status, answer = await client.post({"model": "any", "messages": ASKED, **neutral})
        assert (status, answer["model"]) == (200, "any")


async def test_other_sampling_may_be_passed_over(tokenizer):
    generator = ScriptedGenerator(tokenizer, turns(ANSWER))
    async with serving(generator, tokenizer, ignores_sampling=True) as client:
        await client.ask(ASKED, temperature=0.0, top_p=0.5)
    assert generator.requests["42-5"][0][1].temperature == 0.8


async def test_bodies_and_paths_that_are_none(tokenizer):
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        assert (await client.post([]))[0] == 400
        async with aiohttp.ClientSession() as http:
            broken = await http.post(f"{client.url}/chat/completions", data="{")
            assert (broken.status, (await broken.json())["error"]["type"]) == (400, "invalid_request_error")
            other = await http.post(f"{client.url}/embeddings", json={})
            assert (other.status, "only chat/completions and models" in (await other.json())["error"]["message"]) == (
                404,
                True,
            )


async def test_tools_that_the_template_does_not_show_are_refused():
    tokenizer = tokenizer_with(CHATML)
    async with serving(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer) as client:
        with pytest.raises(openai.BadRequestError, match="does not show tools to the model"):
            await client.ask(ASKED, tools=[ADD])


def test_a_tokenizer_without_a_chat_template_cannot_speak():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="needs a chat template"):
        Speaker(ScriptedGenerator(tokenizer, turns(ANSWER)), tokenizer)
