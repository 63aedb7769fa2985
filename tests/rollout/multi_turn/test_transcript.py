"""A transcript only grows, and knows of each token whose it is."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.fakes import routes_of
from vime.data.codec import sample_from_json, sample_to_json
from vime.models.routes import known_tokens
from vime.rollout.multi_turn.transcript import NotAppended, Transcript
from vime.types import Generation, Sample, Status

PROMPT = [1, 2, 3]


def generation(*token_ids: int, version: int = 4) -> Generation:
    return Generation(
        token_ids=list(token_ids),
        log_probs=[-token / 10 for token in token_ids],
        weight_versions=[version] * len(token_ids),
        finish_reason="stop",
    )


def sampled(transcript: Transcript, *token_ids: int, version: int = 4) -> None:
    transcript.sampled(generation(*token_ids, version=version), transcript.tokens)


def two_turns() -> Transcript:
    transcript = Transcript(PROMPT)
    sampled(transcript, 10, 11)
    transcript.said([20, 21, 22])
    sampled(transcript, 12, version=5)
    return transcript


def written(transcript: Transcript, sample: Sample | None = None) -> Sample:
    sample = sample or Sample(index=0, group_index=0)
    transcript.write(sample, status=Status.COMPLETED, response="text")
    return sample


def test_what_was_sampled_is_trained_and_what_was_said_is_not() -> None:
    sample = written(two_turns())
    assert sample.tokens == [1, 2, 3, 10, 11, 20, 21, 22, 12]
    assert sample.response_length == 6
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-1.0, -1.1, 0.0, 0.0, 0.0, -1.2]
    assert sample.weight_versions == [4, 4, 4, 4, 4, 5]
    assert (sample.response, sample.status) == ("text", Status.COMPLETED)
    sample.validate()


def test_turns_are_known_by_their_places() -> None:
    transcript = two_turns()
    assert transcript.turns == (range(3, 5), range(8, 9))
    assert (transcript.turn(0), transcript.turn(-1)) == ((10, 11), (12,))
    assert written(transcript).metadata["multi_turn"] == {"turns": [[0, 2], [5, 6]]}


def test_a_turn_that_was_sampled_in_pieces_is_one_turn() -> None:
    transcript = Transcript(PROMPT)
    sampled(transcript, 10, version=1)
    sampled(transcript, 11, version=2)
    assert transcript.turns == (range(3, 5),)
    assert written(transcript).weight_versions == [1, 2]


def test_an_answer_without_tokens_is_no_turn() -> None:
    transcript = Transcript(PROMPT)
    sampled(transcript)
    assert transcript.turns == () and not transcript.in_turn


def test_what_is_said_before_the_first_turn_has_the_version_of_that_turn() -> None:
    transcript = Transcript(PROMPT)
    transcript.said([7])
    assert written(transcript).weight_versions == []
    sampled(transcript, 10, version=9)
    assert written(transcript).weight_versions == [9, 9]


@pytest.mark.parametrize("given", [[1, 2], [1, 2, 4], [1, 2, 3, 10]])
def test_an_answer_to_other_tokens_is_refused(given: list[int]) -> None:
    """A dialogue that was rendered anew, or shortened, is not what stands here."""
    with pytest.raises(NotAppended, match=rf"continued {len(given)} tokens which are not the 3 of this transcript"):
        Transcript(PROMPT).sampled(generation(10), given)


def test_answers_without_log_probs_or_versions_are_refused() -> None:
    transcript = Transcript(PROMPT)
    bare = Generation(token_ids=[10], log_probs=[], weight_versions=[1], finish_reason="stop")
    nan = Generation(token_ids=[10], log_probs=[math.nan], weight_versions=[1], finish_reason="stop")
    with pytest.raises(NotAppended, match="1 tokens has 0 log-probs and 1 weight versions"):
        transcript.sampled(bare, transcript.tokens)
    with pytest.raises(NotAppended, match="not finite"):
        transcript.sampled(nan, transcript.tokens)
    assert transcript.tokens == tuple(PROMPT)


@pytest.mark.parametrize("said", ["text", [1.5], [-1]])
def test_only_token_ids_can_be_said(said: object) -> None:
    with pytest.raises(NotAppended, match="must be token ids"):
        Transcript(PROMPT).said(said)  # type: ignore[arg-type]


def test_there_is_no_transcript_without_a_prompt() -> None:
    with pytest.raises(NotAppended, match="at least one token"):
        Transcript([])


def test_a_sample_with_other_tokens_is_not_overwritten() -> None:
    with pytest.raises(NotAppended, match="its 2 tokens are not the first of the 9"):
        written(two_turns(), Sample(index=0, tokens=[1, 9]))
    assert written(two_turns(), Sample(index=0, tokens=[1, 2])).response_length == 6


def test_what_is_handed_out_cannot_be_changed_behind_its_back() -> None:
    transcript = two_turns()
    sample = written(transcript)
    sample.tokens.append(99)
    sample.loss_mask = None
    assert len(transcript) == 9 and transcript.loss_mask == (1, 1, 0, 0, 0, 1)


def test_an_interrupted_sample_goes_on_where_it_was_also_after_a_checkpoint() -> None:
    interrupted = sample_from_json(sample_to_json(written(two_turns())))
    transcript = Transcript.of(interrupted)
    sampled(transcript, 13, version=6)
    transcript.said([23])
    sample = written(transcript, interrupted)
    assert sample.tokens == [1, 2, 3, 10, 11, 20, 21, 22, 12, 13, 23]
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1, 1, 0]
    assert sample.weight_versions == [4, 4, 4, 4, 4, 5, 6, 6]
    assert sample.metadata["multi_turn"]["turns"] == [[0, 2], [5, 7]]


def test_routes_only_ever_grow_also_after_a_checkpoint() -> None:
    """An engine tells those of all that it was given and sampled, but of the last token; what was known stays."""
    transcript = Transcript(PROMPT)
    transcript.sampled(routed(transcript, [10, 11], version=1), transcript.tokens)
    transcript.said([20, 21])
    transcript.sampled(routed(transcript, [12], version=2), transcript.tokens)
    sample = sample_from_json(sample_to_json(written(transcript)))
    transcript = Transcript.of(sample)
    transcript.sampled(routed(transcript, [13, 14], version=3), transcript.tokens)
    transcript.said([22])
    sample = written(transcript, sample)
    tokens = [1, 2, 3, 10, 11, 20, 21, 12, 13, 14]
    assert sample.tokens == [*tokens, 22]
    first, second, third = (routes_of(tokens, version) for version in (1, 2, 3))
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.tolist() == [*first[:4].tolist(), *second[4:7].tolist(), *third[7:9].tolist()]


def test_a_copy_has_routes_of_its_own() -> None:
    transcript = Transcript(PROMPT)
    other = transcript.copy()
    other.sampled(routed(other, [10, 11]), other.tokens)
    assert known_tokens(transcript.routes) == 0 and known_tokens(other.routes) == 4


def test_routes_that_are_not_those_of_the_tokens_are_refused() -> None:
    transcript = Transcript([1, 2, 3])
    wrong = dataclasses.replace(generation(10, 11), routed_experts=routes_of([1, 2, 3, 10, 11]))
    with pytest.raises(NotAppended, match="the routes of a generation are those of 5 tokens, and only the first 4 of"):
        transcript.sampled(wrong, transcript.tokens)
    assert len(transcript) == 3
    sample = Sample(index=5, tokens=[1, 2, 3], rollout_routed_experts=routes_of([1, 2, 3]))
    with pytest.raises(NotAppended, match=r"sample 5 .*: its rollout_routed_experts are those of 3 tokens"):
        Transcript.of(sample)


def routed(transcript: Transcript, token_ids: list[int], version: int = 1) -> Generation:
    """With routes of the whole text, also where some are known."""
    routes = routes_of([*transcript.tokens, *token_ids], version)[:-1]
    return dataclasses.replace(generation(*token_ids), routed_experts=routes)


def test_turns_of_an_interrupted_sample_stay_turns_when_its_tokens_are_masked_meanwhile() -> None:
    interrupted = written(two_turns())
    interrupted.loss_mask = [0] * 6
    transcript = Transcript.of(interrupted)
    assert transcript.turns == (range(3, 5), range(8, 9)) and transcript.in_turn
    sampled(transcript, 13)
    assert written(transcript).loss_mask == [0, 0, 0, 0, 0, 0, 1]


def test_a_sample_of_the_usual_generate_function_is_one_turn() -> None:
    sample = Sample(
        index=0, tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -1.0], weight_versions=[1, 1]
    )
    assert Transcript.of(sample).turns == (range(1, 3),)


def test_a_sample_without_log_probs_cannot_be_continued() -> None:
    with pytest.raises(NotAppended, match="2 response tokens cannot be continued"):
        Transcript.of(Sample(index=0, tokens=[1, 2, 3], response_length=2))


TOKENS = st.lists(st.integers(0, 9), max_size=4)
STEPS = st.lists(st.tuples(st.sampled_from(["sampled", "said", "restored"]), TOKENS), max_size=8)


@given(STEPS)
def test_each_token_is_trained_exactly_if_it_was_sampled(steps: list[tuple[str, list[int]]]) -> None:
    """Whatever the order, and however often the sample goes through a checkpoint in between."""
    transcript, owners, tokens = Transcript(PROMPT), [], []
    for step, ids in steps:
        if step == "sampled":
            sampled(transcript, *ids)
        elif step == "said":
            transcript.said(ids)
        else:
            transcript = Transcript.of(sample_from_json(sample_to_json(written(transcript))))
            continue
        owners += [int(step == "sampled")] * len(ids)
        tokens += ids
    sample = written(transcript)
    assert (sample.loss_mask, sample.tokens) == (owners, PROMPT + tokens)
    assert sample.rollout_log_probs == [-token / 10 * owner for token, owner in zip(tokens, owners, strict=True)]
    turns = sample.metadata["multi_turn"]["turns"]
    assert [sum(start <= i < stop for start, stop in turns) for i in range(len(owners))] == owners
    assert sample.weight_versions == ([4] * len(owners) if any(owners) else [])


def test_a_sample_that_is_cut_goes_on_where_it_was_cut() -> None:
    """Within the second turn, and between the turns."""
    for length, turns in ((9, [[3, 5], [8, 9]]), (7, [[3, 5]])):
        transcript, sample = two_turns(), Sample(index=0)
        sampled(transcript, 13, 14, version=6)
        transcript.write(sample, status=Status.ABORTED, response="")
        sample.cut(length)
        found = Transcript.of(sample)
        assert found.tokens == transcript.tokens[:length]
        assert [[turn.start, turn.stop] for turn in found.turns] == turns
    with pytest.raises(ValueError, match=r"sample 0 .*: of 7 tokens, 3 of them the prompt, 2 cannot be kept"):
        sample.cut(2)
