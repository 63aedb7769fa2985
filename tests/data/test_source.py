"""The prompt source: order, identity, buffer, and the same future after a restart."""

import dataclasses
import json

import numpy as np
import pytest

from tests.tiny import make_tokenizer
from vime.config import resolve
from vime.data.chat import PromptEncoder
from vime.data.jsonl import Keys
from vime.data.prompt_set import Limit, PromptSet
from vime.data.source import PromptSource, check_group_size, encoder_of
from vime.errors import UserError
from vime.types import Grade, Sample, Status


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


def rows_of(count):
    return [{"prompt": f"p{i}", "label": i, "metadata": {"list": [i]}} for i in range(count)]


def source_of(path, **options):
    encoder = PromptEncoder(make_tokenizer(), apply_chat_template=options.pop("apply_chat_template", False))
    asked = {name: options.pop(name) for name in ("needs_label", "skip_bad_rows", "limit") if name in options}
    prompts = PromptSet(spec=path, keys=Keys(input="prompt", label="label"), **asked)
    return PromptSource(prompts, encoder=encoder, **options)


def prompts(groups):
    return [group[0].prompt for group in groups]


# --- order and identity --------------------------------------------------------------------------------


def test_three_rows_fill_a_batch_of_eight_over_three_epochs(write):
    groups = source_of(write(rows_of(3))).get_samples(8)
    assert prompts(groups) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0", "p1"]


def test_a_group_holds_n_samples_of_one_prompt_with_indices_of_their_own(write):
    source = source_of(write(rows_of(3)), n_samples=2)
    samples = [sample for group in source.get_samples(2) + source.get_samples(2) for sample in group]
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sample.index for sample in samples] == list(range(8))
    assert len({sample.session_id for sample in samples}) == 8
    assert [sample.label for sample in samples] == ["0", "0", "1", "1", "2", "2", "0", "0"]
    assert all(sample.tokens == [] and sample.status is Status.PENDING for sample in samples)


def test_samples_share_nothing_that_a_hook_could_change(write):
    first, second = source_of(write(rows_of(1)), n_samples=2).get_samples(1)[0]
    first.metadata["list"].append("changed")
    assert second.metadata["list"] == [0]


def test_shuffling_permutes_each_epoch_by_seed_and_epoch(write):
    path = write(rows_of(50))
    drawn = prompts(source_of(path, shuffle=True, seed=1).get_samples(100))
    first, second = drawn[:50], drawn[50:]
    assert sorted(first) == sorted(second) == sorted(f"p{i}" for i in range(50))
    assert first != second
    assert prompts(source_of(path, shuffle=True, seed=1).get_samples(100)) == drawn
    assert prompts(source_of(path, shuffle=True, seed=2).get_samples(50)) == second  # seed + epoch


def test_how_much_is_drawn_at_once_does_not_matter(write):
    path = write(rows_of(7))
    one, other = source_of(path, shuffle=True), source_of(path, shuffle=True)
    assert [g for _ in range(10) for g in one.get_samples(2)] == other.get_samples(13) + other.get_samples(7)


def test_the_template_is_rendered_into_the_sample(write):
    sample = source_of(write(rows_of(1)), apply_chat_template=True).get_samples(1)[0][0]
    assert sample.prompt == "<|im_start|>user\np0<|im_end|>\n<|im_start|>assistant\n"


def test_once_each_gives_the_same_groups_each_time_and_moves_nothing(write):
    source = source_of(write(rows_of(3)), n_samples=2, shuffle=True)
    assert prompts(source.once_each()) == ["p0", "p1", "p2"]
    assert source.once_each() == source.once_each()
    assert source.get_samples(1)[0][0].index == 0


# --- what is left out --------------------------------------------------------------------------------------


def test_prompts_that_are_too_long_are_dropped_and_counted(write, caplog):
    long = "1 " * 50
    rows = [{"prompt": "1"}, {"prompt": long}, {"prompt": [{"role": "user", "content": long}]}]
    source = source_of(write(rows), limit=Limit(60))
    assert (len(source), source.dropped) == (1, 2)
    assert "dropped 2 prompts of over 60 tokens" in caplog.text


def test_where_all_are_too_long_nothing_starts(write):
    with pytest.raises(UserError, match="all 2 prompts have over 1 tokens"):
        source_of(write(rows_of(2)), limit=Limit(1))


def test_no_rows_at_all(write):
    with pytest.raises(UserError, match="there are no rows"):
        source_of(write([]))


def test_bad_rows_stop_the_start_unless_they_shall_be_skipped(write, caplog):
    path = write([{"prompt": "a"}, [], {"prompt": "b"}])
    with pytest.raises(UserError, match=":2: a row must be a JSON object"):
        source_of(path)
    source = source_of(path, skip_bad_rows=True)
    assert (len(source), source.skipped) == (2, 1)
    assert "skipped 1 bad rows" in caplog.text


# --- the buffer -------------------------------------------------------------------------------------------


def test_groups_that_were_put_back_come_first_and_fresh_ones_fill_up(write):
    source = source_of(write(rows_of(9)))
    first = source.get_samples(3)
    source.add_samples(first[1:])
    again = source.get_samples(4)
    assert again[:2] == first[1:]
    assert prompts(again[2:]) == ["p3", "p4"]


def test_a_buffer_filter_chooses(write):
    source = source_of(write(rows_of(9)), buffer_filter=lambda buffer, count: [buffer.pop()])
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(2)) == ["p2", "p3"]


def test_a_buffer_filter_that_returns_too_much_is_refused(write):
    source = source_of(write(rows_of(9)), buffer_filter=lambda buffer, count: list(buffer))
    source.add_samples(source.get_samples(3))
    with pytest.raises(UserError, match="returned 3 groups where 1 were wanted"):
        source.get_samples(1)


@pytest.mark.parametrize("value", [np.zeros(2), float("nan"), [1.0, float("inf")]])
def test_what_a_checkpoint_cannot_hold_is_refused_when_it_is_put_back(write, value):
    source = source_of(write(rows_of(3)))
    groups = source.get_samples(1)
    groups[0][0].metadata["value"] = value
    with pytest.raises(UserError, match=r"sample 0 .*: metadata cannot be kept in a checkpoint"):
        source.add_samples(groups)


# --- restart -------------------------------------------------------------------------------------------------


def partial(sample):
    """A sample with every field set, as an interrupted generation might leave it."""
    values = {
        "tokens": [1, 2, 3], "response": "é\n", "response_length": 2, "reward": {"acc": 1.0}, "loss_mask": [1, 0],
        "grade": Grade(score=1.0, detail="d", extra={"acc": 1.0}), "rollout_log_probs": [-0.1, -2.5e-8],
        "teacher_log_probs": [-3.0, -0.5],
        "rollout_routed_experts": np.array([[[1, 3]], [[0, 2]]], np.uint8),
        "weight_versions": [3, 4], "status": Status.ABORTED, "awaits_hooks": True,
        "remove_sample": True, "metadata": {"start_rollout_id": 5},
        "train_metadata": {"x": None}, "multimodal_inputs": {"image": "i"}, "multimodal_train_inputs": {"n": 1},
        "custom_rm_path": "a:b", "custom_generate_function_path": "c:d", "rollout_id": 7, "parent_index": 0,
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(Sample)} - set(values) <= {
        "group_index",
        "index",
        "prompt",
        "label",
        "session_id",
    }
    return dataclasses.replace(sample, **values)


@pytest.mark.parametrize("shuffle", [False, True])
def test_after_a_restart_the_same_prompts_come_with_the_same_indices(write, shuffle):
    path = write(rows_of(5))
    options = {"n_samples": 2, "shuffle": shuffle}
    source = source_of(path, **options)
    for _ in range(3):
        groups = source.get_samples(3)
    source.add_samples([[partial(sample) for sample in groups[0]], groups[2]])
    state = json.loads(json.dumps(source.state_dict()))
    restarted = source_of(path, **options)
    restarted.load_state_dict(state)
    assert restarted.state_dict() == source.state_dict()
    assert [restarted.get_samples(4) for _ in range(5)] == [source.get_samples(4) for _ in range(5)]


def test_a_state_is_not_changed_by_what_happens_after(write):
    source = source_of(write(rows_of(5)))
    groups = source.get_samples(1)
    source.add_samples(groups)
    state = source.state_dict()
    groups[0][0].metadata["list"].append(1)
    assert state["buffer"][0][0]["metadata"] == {"list": [0], "raw_label": 0}


def test_another_file_is_refused(write):
    state = source_of(write(rows_of(5))).state_dict()
    with pytest.raises(UserError, match="the file is not the one this run was saved with"):
        source_of(write(rows_of(6), "other.jsonl")).load_state_dict(state)


def test_another_choice_of_rows_is_refused(write):
    path = write([{"prompt": "1"}, {"prompt": "1 " * 50}])
    state = source_of(path).state_dict()
    with pytest.raises(UserError, match="1 of its rows are used"):
        source_of(path, limit=Limit(60)).load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"seed": 1, "shuffle": True}, {"seed": 2, "shuffle": True}),
        ({"seed": 1, "shuffle": True}, {"seed": 1}),
        ({"seed": 1}, {"seed": 1, "shuffle": True}),
    ],
)
def test_an_epoch_that_was_begun_ends_in_its_order_and_the_next_has_that_of_the_flags(write, before, after, caplog):
    path = write(rows_of(10))
    first = source_of(path, **before)
    seen = prompts(first.get_samples(4))
    resumed = source_of(path, **after)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{path}: epoch 0 goes on in the order in which it began (--")
    again = source_of(path, **after)  # resumed once more within the epoch
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert seen + prompts(again.get_samples(6)) == prompts(source_of(path, **before).get_samples(10))
    assert prompts(again.get_samples(10)) == prompts(source_of(path, **after).get_samples(20)[10:])


def test_between_epochs_another_order_is_no_matter(write, caplog):
    path = write(rows_of(3))
    first = source_of(path, seed=1, shuffle=True)
    first.get_samples(3)
    resumed = source_of(path, seed=2, shuffle=True)
    resumed.load_state_dict(first.state_dict())
    assert prompts(resumed.get_samples(3)) == prompts(source_of(path, seed=2, shuffle=True).get_samples(6)[3:])
    assert caplog.records == []


def test_a_seed_that_orders_nothing_is_no_matter(write, caplog):
    path = write(rows_of(3))
    first = source_of(path, seed=1)
    first.get_samples(1)
    source_of(path, seed=2).load_state_dict(first.state_dict())
    assert caplog.records == []


def test_a_state_of_an_older_version_is_read(write):
    path = write(rows_of(5))
    source = source_of(path, shuffle=True)
    source.get_samples(2)
    state = {name: value for name, value in source.state_dict().items() if name not in ("ordering", "n_samples")}
    resumed = source_of(path, shuffle=True)
    resumed.load_state_dict(state)
    check_group_size({"source": state}, 3)
    assert resumed.get_samples(5) == source.get_samples(5)


def test_groups_that_wait_keep_their_size(write):
    source = source_of(write(rows_of(5)), n_samples=2)
    check_group_size({"source": source.state_dict()}, 4)  # nothing waits
    check_group_size({"source": ["a user's own"]}, 4)
    source.add_samples(source.get_samples(1))
    state = {"source": source.state_dict(), "rollouts": {"groups": [[], []]}}
    check_group_size(state, 2)
    with pytest.raises(UserError) as caught:
        check_group_size(state, 4)
    assert str(caught.value) == (
        "--n-samples-per-prompt 4: 3 unfinished groups of the checkpoint have 2 samples each; give 2, or start anew "
        "from its weights by --ref-load without --load"
    )


# --- from flags ---------------------------------------------------------------------------------------------


def from_flags(*flags):
    config = resolve(list(flags)).config
    return PromptSource.from_config(config, encoder_of(config, make_tokenizer()))


def test_the_source_of_a_configuration(write):
    path = write([{"q": "a", "a": 1}, {"q": "b", "a": 2}])
    flags = ["--input-key", "q", "--label-key", "a", "--rm-type", "math", "--n-samples-per-prompt", "3"]
    group = from_flags("--prompt-data", path, *flags, "--apply-chat-template").get_samples(1)[0]
    assert [sample.label for sample in group] == ["1"] * 3
    assert group[0].prompt.startswith("<|im_start|>user\na")


def test_a_label_key_that_no_row_has_ends_a_run_at_its_start(write):
    path = write([{"input": "a", "label": "1"}])
    flags = ["--prompt-data", path, "--label-key", "answer", "--custom-rm-path", "m.f"]
    with pytest.raises(UserError, match="no row has a label under the key 'answer'"):
        PromptSource.from_config(resolve(flags).config, PromptEncoder(make_tokenizer()))


def test_a_rule_reward_needs_labels_and_a_custom_one_does_not(write):
    path = write([{"input": "a"}])
    with pytest.raises(UserError, match=":1: the reward needs a label"):
        from_flags("--prompt-data", path, "--rm-type", "math")
    assert len(from_flags("--prompt-data", path, "--rm-type", "math", "--custom-rm-path", "m:f")) == 1


def test_without_prompts_there_is_no_source():
    with pytest.raises(UserError, match=r"--prompt-data: name a \.jsonl file"):
        from_flags()
