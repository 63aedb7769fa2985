"""The records that flow between the parts of vime, in the order in which data meets them.

``Sample`` is mutable until its group closes, because users' hooks assign to it; ``TrainSample``, ``RolloutBatch`` and
``TrainBatch`` are frozen. Nothing here imports torch, Ray, vLLM or Megatron.

Lengths in comments and docstrings: L = tokens of prompt and response together, T = tokens of the response.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from vime.errors import UserError
from vime.metadata import MULTI_TURN, multi_turn_of
from vime.naming import rollout_name

if TYPE_CHECKING:
    import numpy as np

Message: TypeAlias = dict[str, Any]
"""One chat message: ``role`` and ``content``, perhaps ``tool_calls`` and ``step_loss_mask``."""

RoutedExperts: TypeAlias = "np.ndarray[Any, Any]"
"""Integers [tokens, layers with experts, top_k]: to which experts tokens were sent; see ``models.routes``."""


WeightVersion: TypeAlias = int
"""0 before the first weight sync of a run; each sync makes the next one."""


Role: TypeAlias = Literal["actor", "critic"]
"""The models that learn."""

CHILD_STRIDE = 1 << 40
"""How far the indices of the children of one sample are apart: no run draws that many samples, and 8,192 children
still have indices that JSON's numbers hold exactly."""


class InvalidSample(UserError):
    """A Sample which breaks a rule that training relies on. The message names the sample and the rule."""


class NotFinite(InvalidSample):
    """A reward that is a number, but NaN, infinite or too large for a float."""


class Status(enum.Enum):
    """How the generation of a Sample ended."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # the model stopped by itself
    TRUNCATED = "truncated"  # it ran into the length limit
    ABORTED = "aborted"  # it was interrupted, what it had is kept
    FAILED = "failed"  # the engine or a hook failed; never trained on


_Status: TypeAlias = Status  # within Sample, the name Status is the class attribute


class GradeStatus(enum.Enum):
    """What a Grade says."""

    SCORED = "scored"  # score is a finite number
    INVALID = "invalid"  # the response cannot be graded (no answer in it); counts with its score, normally 0
    ERROR = "error"  # the grader failed or ran out of time; counted and shown, never a silent 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A reward and how it came about. ``score`` is None exactly when ``status`` is ERROR."""

    score: float | None
    status: GradeStatus = GradeStatus.SCORED
    detail: str = ""  # one line: the extracted answer, or what went wrong
    extra: dict[str, Any] = field(default_factory=dict)  # further values of a dict reward, e.g. dapo's acc and pred

    def __post_init__(self) -> None:
        if (self.score is None) != (self.status is GradeStatus.ERROR):
            raise ValueError(f"a Grade has no score exactly when it is an error, not {self.score!r} with {self.status}")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a score is a finite number, not {self.score}")

    @classmethod
    def error(cls, detail: str) -> Grade:
        return cls(score=None, status=GradeStatus.ERROR, detail=detail)


@dataclass(slots=True, kw_only=True)
class Sample:
    """One answer to one prompt, from the jsonl row to the graded response.

    What a custom generate function must fill: ``tokens``, ``response_length``, ``response``, ``status``, and
    ``loss_mask`` where some response tokens are not the model's own.
    """

    group_index: int | None = None  # which group (prompt draw) it belongs to, unique in a run
    index: int | None = None  # unique in a run
    parent_index: int | None = None  # a child's: of the drawn sample of which one generate call made several
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)  # [L] prompt and response ids
    response: str = ""
    response_length: int = 0  # T; in a dialogue of several turns all that follows the first prompt
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    grade: Grade | None = None
    loss_mask: list[int] | None = None  # [T] 1 = trained, 0 = not; None means all ones
    rollout_log_probs: list[float] | None = None  # [T] nats, as the engine computed them
    teacher_log_probs: list[float] | None = None  # [T] nats, of the teacher of on-policy distillation
    weight_versions: list[WeightVersion] = field(default_factory=list)  # [T]
    rollout_routed_experts: RoutedExperts | None = field(default=None, hash=False)  # at most [L - 1, layers, top_k]
    status: _Status = _Status.PENDING
    awaits_hooks: bool = False  # generated, and not shown to the sample hooks yet
    remove_sample: bool = False  # True: keeps its place in baseline and denominator, its mask becomes 0
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None  # the router keeps all turns of a session on one engine
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None

    Status: ClassVar[type[_Status]] = _Status  # the guide writes Sample.Status.COMPLETED

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)

    @property
    def truncated(self) -> bool:
        return self.status is Status.TRUNCATED

    @truncated.setter
    def truncated(self, value: bool) -> None:
        self._set_flag(Status.TRUNCATED, value)

    @property
    def aborted(self) -> bool:
        return self.status is Status.ABORTED

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._set_flag(Status.ABORTED, value)

    def _set_flag(self, status: _Status, value: bool) -> None:
        if value:
            self.status = status
        elif self.status in (status, Status.PENDING):
            self.status = Status.COMPLETED

    @property
    def ended_well(self) -> bool:
        """Whether the response can be trained on."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED)

    @property
    def is_unfinished(self) -> bool:
        """Whether there is something left to generate. A child is what it is: nothing goes on from it."""
        return self.parent_index is None and self.status in (Status.PENDING, Status.ABORTED)

    def copy(self) -> Sample:
        """The same sample, for somebody to work on: nothing that is changed in it changes this one.

        Inputs of other modalities and routes are large, and shared.
        """
        shared = ("multimodal_inputs", "multimodal_train_inputs")
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return Sample(**{name: value if name in shared else _copied(value) for name, value in values})

    def cut(self, length: int) -> None:
        """Keeps the first ``length`` tokens, with what is known of each: mask, log-probs, versions, routes, turns.

        A sample that goes on with other tokens in place of some of its own must be cut first: nothing tells later that
        a log-prob or a route is that of a token which is no longer there. The text stays as it is: decode it anew.

        Raises:
            ValueError: it has fewer tokens, or ``length`` ends within the prompt.
        """
        begin = self.prompt_length
        if not begin <= length <= len(self.tokens):
            raise ValueError(
                f"{self.name}: of {len(self.tokens)} tokens, {begin} of them the prompt, {length} cannot be kept"
            )
        kept = length - begin
        self.tokens, self.response_length = self.tokens[:length], kept
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "weight_versions"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[:kept])
        if self.rollout_routed_experts is not None:
            self.rollout_routed_experts = self.rollout_routed_experts[: max(length - 1, 0)]
        known = multi_turn_of(self.metadata)
        if "turns" in known:
            turns = [[start, min(stop, kept)] for start, stop in known["turns"] if start < kept]
            self.metadata = {**self.metadata, MULTI_TURN: {**known, "turns": turns}}

    def restarted(self) -> Sample:
        """The same prompt, for an answer of its own: nothing of the present one is left."""
        fresh = replace(
            self.copy(),
            tokens=[],  # whoever answers it encodes the prompt, perhaps otherwise
            response="",
            response_length=0,
            reward=None,
            grade=None,
            loss_mask=None,
            rollout_log_probs=None,
            teacher_log_probs=None,
            weight_versions=[],
            rollout_routed_experts=None,
            status=Status.PENDING,
            awaits_hooks=False,
            remove_sample=False,
        )
        for known in ("start_rollout_id", MULTI_TURN):  # of the answer
            fresh.metadata.pop(known, None)
        return fresh

    @property
    def trained_versions(self) -> list[WeightVersion]:
        """Of the weights that sampled the tokens with a loss; nothing where versions are not known."""
        if self.loss_mask is None:
            return self.weight_versions
        return [version for version, trained in zip(self.weight_versions, self.loss_mask, strict=False) if trained]

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def origin(self) -> int | None:
        """The index of the drawn sample: the parent's, or its own."""
        return self.index if self.parent_index is None else self.parent_index

    def adopt(self, parent: int, number: int) -> None:
        """Makes it a child, the ``number``-th from 0, of the drawn sample ``parent``.

        The identity is a function of both alone; the first child has its parent's index.
        """
        self.parent_index, self.index = parent, parent + number * CHILD_STRIDE

    @property
    def name(self) -> str:
        """How messages name this sample."""
        place = f"(group {self.group_index}, {rollout_name(self.rollout_id)})"
        if self.parent_index is not None and self.index is not None:
            number = (self.index - self.parent_index) // CHILD_STRIDE
            return f"child {number} of sample {self.parent_index} {place}"
        return f"sample {self.index} {place}"

    def score(self, reward_key: str | None = None) -> float:
        """The reward as one finite number.

        Raises:
            NotFinite: it is a number that no finite float is.
            InvalidSample: there is none, or it is not a number.
        """
        value = self.reward
        if isinstance(value, dict):
            if reward_key is None:
                raise InvalidSample(f"{self.name}: the reward is a dict {sorted(value)}; name one key by --reward-key")
            if reward_key not in value:
                raise InvalidSample(f"{self.name}: the reward has no key {reward_key!r}, only {sorted(value)}")
            value = value[reward_key]
        if not isinstance(value, numbers.Real):
            raise InvalidSample(f"{self.name}: the reward must be a number, not {value!r}")
        number = as_float(value)
        if not math.isfinite(number):
            raise NotFinite(f"{self.name}: the reward must be finite, not {number}")
        return number

    def validate(self) -> None:
        """Checks what conversion to training data relies on.

        Raises:
            InvalidSample: a length, status or value is wrong.
        """
        if not self.ended_well:
            raise InvalidSample(
                f"{self.name}: status is {self.status.value}, only completed or truncated can be trained"
            )
        if not 0 < self.response_length <= len(self.tokens):
            raise InvalidSample(
                f"{self.name}: response_length is {self.response_length}, "
                f"it must be from 1 to the {len(self.tokens)} tokens"
            )
        for what, values in (
            ("loss_mask", self.loss_mask),
            ("rollout_log_probs", self.rollout_log_probs),
            ("teacher_log_probs", self.teacher_log_probs),
            ("weight_versions", self.weight_versions or None),
        ):
            if values is not None and len(values) != self.response_length:
                raise InvalidSample(
                    f"{self.name}: {what} has {len(values)} entries for {self.response_length} response tokens"
                )
        if self.loss_mask is not None and not set(self.loss_mask) <= {0, 1}:
            raise InvalidSample(f"{self.name}: loss_mask holds values other than 0 and 1")


def _equal(one: Sample | TrainSample | Generation, other: object) -> bool:
    """Whether two records are the same; the equality that dataclasses make cannot tell of arrays."""
    if type(one) is not type(other):
        return False
    import numpy as np  # here, because flags are read and explained without it

    def same(a: Any, b: Any) -> bool:
        is_array = isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        return np.array_equal(a, b) if is_array else bool(a is b or a == b)

    return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))


def _copied(value: Any) -> Any:
    """Long lists of numbers are copied as such: a deep copy takes a hundred times as long."""
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value[:1]):
        return list(value)
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


Group: TypeAlias = list[Sample]
"""The n samples of one prompt draw; all share ``group_index``. Where a generate call made several samples of one, its
children stand in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What models say of the response tokens of one sample before an update; None where nobody was asked."""

    values: tuple[float, ...] | None = None  # [T] of the critic: the reward to come, before each token
    log_probs: tuple[float, ...] | None = None  # [T] nats, of the actor
    ref_log_probs: tuple[float, ...] | None = None  # [T] nats, of the reference model
    teacher_log_probs: tuple[float, ...] | None = None  # [T] nats, of the teacher of on-policy distillation

    def merged(self, other: TokenScores) -> TokenScores:
        """With what ``other`` has in place of what is here."""
        found = {name: getattr(other, name) for name in ("values", "log_probs", "ref_log_probs", "teacher_log_probs")}
        return replace(self, **{name: value for name, value in found.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """A finished Sample, as the trainer gets it."""

    index: int
    group_index: int
    tokens: tuple[int, ...]  # [L]
    response_length: int  # T
    loss_mask: tuple[int, ...]  # [T], all zero for a removed sample
    rollout_log_probs: tuple[float, ...] | None  # [T]
    weight_versions: tuple[WeightVersion, ...]  # [T], or empty where the generate function gave none
    raw_reward: float  # 0 where there is none
    reward: float  # after group normalisation or the user's post-processing; 0 where there is none
    parent_index: int | None = None  # see ``Sample.parent_index``
    sibling_tokens: int = 0  # trained tokens of the other children of its parent: they share a denominator
    graded: bool = True  # whether there is a reward; a sample without one is never trained on
    truncated: bool = False
    metadata: dict[str, Any] | None = None
    routed_experts: RoutedExperts | None = field(default=None, hash=False)  # at most [L - 1, layers, top_k]
    scores: TokenScores = TokenScores()
    counts: bool = True  # whether it is one of N in means over samples; False: as if it were not there

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)

    @property
    def total_length(self) -> int:
        return len(self.tokens)

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def origin(self) -> int:
        """The index of the drawn sample: the parent's, or its own."""
        return self.index if self.parent_index is None else self.parent_index

    @property
    def order(self) -> tuple[int, int]:
        """The key by which samples are ordered: children follow each other in the place of their parent."""
        return self.origin, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """All samples of one rollout, in their ``order`` whatever the order in which they finished."""

    rollout_id: int
    samples: tuple[TrainSample, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    def with_scores(self, scores: Mapping[int, TokenScores]) -> RolloutBatch:
        """The same samples with more known of them; ``scores`` has an entry for the index of each."""
        samples = (replace(sample, scores=sample.scores.merged(scores[sample.index])) for sample in self.samples)
        return replace(self, samples=tuple(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """What one data-parallel rank does in one optimizer step.

    The denominators are those of the whole step over all ranks, so that the loss is exact however samples are packed
    and spread.
    """

    micro_batches: tuple[tuple[int, ...], ...]  # positions in TrainBatch.samples; equally many on every rank
    num_samples: (
        int  # N: drawn samples of the step that count, over all ranks; the global batch size unless some do not
    )
    num_tokens: int  # sum of max(trained tokens, 1) over all samples that count, children one by one, over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The share of a rollout of one data-parallel rank."""

    rollout_id: int
    samples: tuple[TrainSample, ...]
    steps: tuple[TrainStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one response."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: int | None = None
    routed_experts_prompt_start: int | None = None  # routes are wanted from this token on; None: they are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine answered to one request; token ids in, token ids out."""

    token_ids: list[int]  # [T]
    log_probs: list[float]  # [T] nats
    weight_versions: list[WeightVersion]  # [T]
    finish_reason: str  # "stop", "length" or "abort"
    routed_experts: RoutedExperts | None = field(default=None, hash=False)
    """From the token on from which they were wanted, without the last one; None: not wanted, or nothing was sampled."""

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What the trainer reports of one rollout: one dict of metrics for each optimizer step."""

    steps: tuple[dict[str, float], ...]
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    memory: dict[str, float] = field(default_factory=dict)  # metrics, in GiB


def derive_seed(*identity: int | str) -> int:
    """A seed in [0, 2^31) that depends on nothing but whom it is for, e.g. (run seed, rollout, sample, turn)."""
    digest = hashlib.sha256("\x1f".join(map(str, identity)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def as_float(value: Any) -> float:
    """The nearest float; infinity for an integer that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, exactly rounded; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
