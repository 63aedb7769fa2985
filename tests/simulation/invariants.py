"""What must hold of every run, whatever went wrong in its world. A check gives one line for each thing that is wrong.

* Every rollout is trained once, in order, on as many whole groups as the flags say.
* A sample is trained at most once; none is lost: groups drawn = trained + buffered + dropped or failed with a count.
* A sample's prompt is that of its group, its tokens, log-probs and versions are those that an engine had, in one piece
  from the prompt to the end, and its reward is that of this very answer.
* No trained token is older than the mode allows.
* An evaluation is answered to the end, by one version, which the engines have to its end.
* The run ends, and leaves nothing running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tests.simulation.engines import END, log_prob, prefix_of
from tests.simulation.episodes import TOOL_TOKENS
from tests.simulation.graders import score_of
from tests.simulation.run import MAX_CONTEXT, Outcome, config_of, make_source
from tests.simulation.texts import Tokenizer
from tests.simulation.world import Training
from vime.types import Group, TrainSample


def violations(outcome: Outcome) -> list[str]:
    """All that is wrong; empty for a run as it should be."""
    if outcome.problems:
        return outcome.problems
    return [
        *_schedule(outcome),
        *_once(outcome),
        *_accounts(outcome),
        *_samples(outcome),
        *_staleness(outcome),
        *_evaluations(outcome),
    ]


def _schedule(outcome: Outcome) -> Iterator[str]:
    trained = [training.batch.rollout_id for training in outcome.history.trainings]
    if trained != list(range(outcome.scenario.rollouts)):
        yield f"trained rollouts {trained} instead of all {outcome.scenario.rollouts} in order"
    rollout = config_of(outcome.scenario).rollout
    for training in outcome.history.trainings:
        sizes = Counter(group for group, _ in {(each.group_index, each.origin) for each in training.batch.samples})
        if len(sizes) != rollout.rollout_batch_size or set(sizes.values()) != {rollout.n_samples_per_prompt}:
            yield f"rollout {training.batch.rollout_id} has groups of these sizes: {dict(sizes)}"


def _once(outcome: Outcome) -> Iterator[str]:
    times = Counter(sample.index for training in outcome.history.trainings for sample in training.batch.samples)
    for index, count in times.items():
        if count > 1:
            yield f"sample {index} was trained {count} times"


def _accounts(outcome: Outcome) -> Iterator[str]:
    """Groups drawn from the file = trained + waiting + dropped, each group in one place only."""
    source, rollouts = outcome.state["source"], outcome.state["rollouts"]
    drawn = set(range(source["next_group_index"]))
    trained = {s.group_index for training in outcome.history.trainings for s in training.batch.samples}
    places = {"trained": sorted(trained)} | {
        name: [group[0]["group_index"] for group in groups]
        for name, groups in (("in the buffer", source["buffer"]), ("in flight", rollouts["groups"]))
    }
    times = Counter(group for groups in places.values() for group in groups)
    for group in sorted(times):
        if times[group] > 1 or group not in drawn:
            where = ", ".join(name for name, groups in places.items() if group in groups)
            yield f"group {group} is {where}: {times[group]} times, and was {'' if group in drawn else 'never '}drawn"
    missing = drawn - set(times)
    counted = int(sum(metrics["rollout/groups/dropped"] for metrics in outcome.history.metrics))
    if len(missing) != counted:
        yield f"groups {sorted(missing)} are nowhere, and {counted} were counted as dropped"
    if rollouts["ledger"]["trained"] != len(trained):
        yield f"{rollouts['ledger']['trained']} groups were counted as trained, and {len(trained)} were"


def _samples(outcome: Outcome) -> Iterator[str]:
    groups = _as_drawn(outcome)
    for training in outcome.history.trainings:
        for sample in training.batch.samples:
            group = groups[sample.group_index] if sample.group_index < len(groups) else []
            for problem in _sample(outcome, training, sample, group):
                yield f"sample {sample.index} of rollout {training.batch.rollout_id}: {problem}"


def _as_drawn(outcome: Outcome) -> list[Group]:
    """What a source that nobody disturbs gives."""
    return make_source(outcome.scenario).get_samples(outcome.state["source"]["next_group_index"])


def _sample(outcome: Outcome, training: Training, sample: TrainSample, group: Group) -> Iterable[str]:
    if sample.origin not in [drawn.index for drawn in group]:
        return [f"it does not belong to group {sample.group_index}"]
    if sample.trained_tokens == 0:
        return []  # it keeps the place of one that failed or has no grade
    return [*_tokens(outcome, sample), *_prompt_and_reward(outcome, sample, group), *_values(outcome, sample)]


def _prompt_and_reward(outcome: Outcome, sample: TrainSample, group: Group) -> Iterator[str]:
    tokenizer, start = Tokenizer(), sample.total_length - sample.response_length
    drawn = group[0]
    assert isinstance(drawn.prompt, str) and drawn.label is not None
    if list(sample.tokens[:start]) != tokenizer.encode(drawn.prompt):
        yield "its prompt is not that of its group"
    response = sample.tokens[start:]
    if sample.raw_reward != score_of(tokenizer.decode(response), drawn.label):
        yield f"a reward of {sample.raw_reward} is not that of its answer"


def _tokens(outcome: Outcome, sample: TrainSample) -> Iterator[str]:
    """What a tool said has a log-prob of 0, which nothing sampled has."""
    length, start = sample.response_length, sample.total_length - sample.response_length
    log_probs, versions = sample.rollout_log_probs, sample.weight_versions
    if log_probs is None or len(versions) != length:
        yield f"{length} tokens have {len(versions)} versions and log-probs {log_probs}"
        return
    if list(versions) != sorted(versions):
        yield f"its versions go back: {versions}"
    prefix, response = prefix_of(sample.tokens[:start]), sample.tokens[start:]
    for place, token in enumerate(response):
        synced, is_said = outcome.history.syncs.get(versions[place]), log_probs[place] == 0
        if synced is None:
            yield f"token {place} has version {versions[place]}, which was never brought to an engine"
        elif is_said and sample.loss_mask[place]:
            yield f"token {place} is trained, and was not sampled"
        elif not is_said and log_probs[place] != log_prob(prefix, token, synced.weights):
            yield f"the log-prob of token {place} is not that of the weights of version {versions[place]}"
        elif token == END and place + 1 < length and log_probs[place + 1] != 0:
            yield f"token {place} ended it, and something was sampled after that"
        else:
            prefix = prefix_of([token], prefix)
            continue
        return
    yield from _ending(outcome, sample, response)


def _values(outcome: Outcome, sample: TrainSample) -> Iterator[str]:
    values = sample.scores.values
    if ("critic" in outcome.scenario.features) != (values is not None and len(values) == sample.response_length):
        yield f"the values of its {sample.response_length} tokens are {values}"


def _ending(outcome: Outcome, sample: TrainSample, response: Sequence[int]) -> Iterator[str]:
    if not sample.truncated and response[-1] != END:
        yield f"it is whole and ends with {response[-1]}"
    left = min(
        config_of(outcome.scenario).rollout.rollout_max_response_len - len(response), MAX_CONTEXT - sample.total_length
    )
    if sample.truncated and left > (TOOL_TOKENS if response[-1] == END else 0):
        yield f"it is truncated, and there is room for {left} tokens"


def _staleness(outcome: Outcome) -> Iterator[str]:
    bound = outcome.scenario.max_staleness
    for training in outcome.history.trainings:
        for sample in training.batch.samples:
            trained = [v for v, mask in zip(sample.weight_versions, sample.loss_mask, strict=False) if mask]
            known = [
                outcome.history.syncs[version].trainings for version in trained if version in outcome.history.syncs
            ]
            if bound is not None and known and training.trainings - min(known) > bound:
                yield (
                    f"sample {sample.index} is {training.trainings - min(known)} trainings old in rollout "
                    f"{training.batch.rollout_id}, at most {bound} are allowed"
                )


def _evaluations(outcome: Outcome) -> Iterator[str]:
    for evaluation in outcome.history.evaluations:
        about = f"the evaluation before rollout {evaluation.rollout_id}"
        if evaluation.unfinished:
            yield f"{about} has {evaluation.unfinished} answers that are not whole"
        if not evaluation.versions <= {evaluation.newest}:
            versions = sorted(evaluation.versions)
            yield f"{about} was answered by versions {versions}, and the engines had {evaluation.newest}"


def differences(outcome: Outcome, plain: Outcome) -> list[str]:
    """What a run does not have bit for bit as its plain one (see ``Scenario.plain``)."""
    found = []
    for mine, its in zip(outcome.history.trainings, plain.history.trainings, strict=False):
        if mine.batch.samples != its.batch.samples:
            found.append(f"rollout {mine.batch.rollout_id} was trained on other samples than in the plain world")
    if not found and outcome.weights != plain.weights:
        found.append("the weights at the end are not those of the plain world")
    if not found and outcome.state != plain.state:
        found.append("source and rollouts end in another state than in the plain world")
    return found[:1]
