"""Where prompts come from: a file that is read over and over, and a buffer of groups that were not finished.

Invariants:
* the order of prompts depends on the file, the seed and the epoch alone, never on who asks when;
* each group drawn has a group index, and each of its samples an index, that no other of the run has;
* state and file together give the very same future after a restart.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.data.chat import PromptEncoder
from vime.data.codec import check_sample, sample_from_json, sample_to_json
from vime.data.jsonl import Row
from vime.data.prompt_set import Limit, PromptSet, prompt_set_of
from vime.errors import UserError
from vime.types import Group, Sample

if TYPE_CHECKING:
    from vime.config import Config

_log = logging.getLogger(__name__)

Selection = Callable[[list[Row]], list[Row]]
"""All good rows of a file → those to draw from."""

BufferFilter = Callable[[list[Group], int], list[Group]]
"""(buffer, how many groups are wanted) → at most so many groups, which it has removed from the buffer."""


def pop_first(buffer: list[Group], count: int) -> list[Group]:
    """Takes the groups that have waited longest."""
    taken = buffer[:count]
    del buffer[:count]
    return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """What the order of prompts depends on, besides file and epoch."""

    seed: int
    shuffle: bool

    def of(self, rows: int, epoch: int) -> list[int]:
        """The rows of one epoch, in the order in which they are drawn."""
        order = list(range(rows))
        if self.shuffle:
            random.Random(self.seed + epoch).shuffle(order)
        return order

    def __str__(self) -> str:
        return f"--rollout-shuffle --rollout-seed {self.seed}" if self.shuffle else "--no-rollout-shuffle"


class PromptSource:
    """Draws groups of samples from a file of prompts; implements ``ports.DataSource``.

    Fresh samples have no tokens yet; a continued one has its prompt and what was generated so far.

    Args:
        prompts: the file, and what is asked of its rows.
        encoder: renders prompts, and measures them where their length is limited.
        n_samples: size of a group.
        seed: of the order of prompts.
        shuffle: permute the prompts anew in each epoch, by seed + epoch; else the order is the file's.
        select: instead of that limit, which rows there are to draw from.
        buffer_filter: which groups of the buffer are continued first.

    Raises:
        UserError: bad rows, no rows, no label in any, or only prompts that are too long.
    """

    def __init__(
        self,
        prompts: PromptSet,
        *,
        encoder: PromptEncoder,
        n_samples: int = 1,
        seed: int = 42,
        shuffle: bool = False,
        select: Selection | None = None,
        buffer_filter: BufferFilter = pop_first,
    ) -> None:
        file = prompts.read()
        self._spec = prompts.spec
        self._digest = file.digest
        self._rows = prompts.fitting(file.rows, encoder) if select is None else select(file.rows)
        self.skipped = len(file.bad)
        self.dropped = len(file.rows) - len(self._rows) if select is None else 0
        self._report(prompts.limit)
        self._encoder = encoder
        self._n_samples = n_samples
        self._given = self._ordering = Ordering(seed=seed, shuffle=shuffle)  # as the flags say; of this epoch
        self._buffer_filter = buffer_filter
        self._buffer: list[Group] = []
        self._epoch = self._cursor = self._next_group_index = self._next_index = 0
        self._order = self._order_of(0)

    @classmethod
    def from_config(
        cls,
        config: Config,
        encoder: PromptEncoder,
        *,
        limit: Limit | None = None,
        buffer_filter: BufferFilter = pop_first,
    ) -> PromptSource:
        """The source of ``--prompt-data``.

        Args:
            limit: of its prompts; None: ``--rollout-max-prompt-len``.

        Raises:
            UserError: as the constructor, or there is no --prompt-data.
        """
        return cls(
            prompt_set_of(config, limit),
            encoder=encoder,
            n_samples=config.rollout.n_samples_per_prompt,
            seed=config.data.rollout_seed,
            shuffle=config.data.rollout_shuffle,
            buffer_filter=buffer_filter,
        )

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._rows)

    def get_samples(self, n: int) -> list[Group]:
        """The next ``n`` groups: buffered ones first, then fresh ones, over as many epochs as it takes."""
        groups = list(self._buffer_filter(self._buffer, n)) if self._buffer else []
        if len(groups) > n:
            raise UserError(f"the buffer filter returned {len(groups)} groups where {n} were wanted")
        return groups + [self._draw() for _ in range(n - len(groups))]

    def add_samples(self, groups: list[Group]) -> None:
        """Takes back groups that were not finished.

        Raises:
            UserError: a sample holds what a checkpoint cannot.
        """
        for group in groups:
            for sample in group:
                check_sample(sample)  # here, where the hook that put it there is near; not hours later, while saving
        self._buffer.extend(groups)

    def once_each(self) -> list[Group]:
        """Fresh groups of all prompts in the file's order, with the same indices each time, as evaluations need them.

        Moves nothing.
        """
        n = self._n_samples
        return [self._group(row, index, index * n) for index, row in enumerate(self._rows)]

    def state_dict(self) -> dict[str, Any]:
        """All that the future depends on, as JSON values."""
        return {
            "digest": self._digest,
            "rows": len(self._rows),
            "epoch": self._epoch,
            "cursor": self._cursor,
            "ordering": dataclasses.asdict(self._ordering),
            "n_samples": self._n_samples,
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
            "buffer": [[sample_to_json(sample.copy()) for sample in group] for group in self._buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises:
            UserError: the file or the choice of its rows is not the one of that time.
        """
        self._check_same_prompts(state)
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._next_group_index, self._next_index = state["next_group_index"], state["next_index"]
        self._buffer = [[sample_from_json(record) for record in group] for group in state["buffer"]]
        self._go_on(Ordering(**state["ordering"]) if "ordering" in state else self._given)  # which older ones lack
        self._order = self._order_of(self._epoch)

    def _go_on(self, begun: Ordering) -> None:
        """An epoch that was begun ends in its own order: in another, prompts would come twice and others never."""
        self._ordering = begun if self._cursor else self._given
        if str(self._ordering) != str(self._given):
            _log.warning(
                "%s: epoch %d goes on in the order in which it began (%s); the next one has that of %s",
                *(self._spec, self._epoch, begun, self._given),
            )

    def _check_same_prompts(self, state: dict[str, Any]) -> None:
        advice = "restore it, or start anew without --load"
        if state["digest"] != self._digest:
            raise UserError(f"{self._spec}: the file is not the one this run was saved with; {advice}")
        if state["rows"] != len(self._rows):
            raise UserError(
                f"{self._spec}: {len(self._rows)} of its rows are used, it was {state['rows']} when this run was saved "
                f"(--rollout-max-prompt-len, --loss-mask-type); {advice}"
            )

    def _draw(self) -> Group:
        row = self._rows[self._order[self._cursor]]
        group = self._group(row, self._next_group_index, self._next_index)
        self._next_group_index += 1
        self._next_index += self._n_samples
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._epoch, self._cursor, self._ordering = self._epoch + 1, 0, self._given
            self._order = self._order_of(self._epoch)
        return group

    def _group(self, row: Row, group_index: int, first_index: int) -> Group:
        prompt = self._encoder.render(row.prompt, row.metadata)
        return [
            Sample(
                group_index=group_index,
                index=index,
                prompt=copy.deepcopy(prompt),
                label=row.label,
                metadata=copy.deepcopy(row.metadata),
                session_id=f"{self._given.seed}-{index}",
            )
            for index in range(first_index, first_index + self._n_samples)
        ]

    def _order_of(self, epoch: int) -> list[int]:
        return self._ordering.of(len(self._rows), epoch)

    def _report(self, limit: Limit | None) -> None:
        if self.skipped:
            _log.warning("%s: skipped %d bad rows", self._spec, self.skipped)
        if self.dropped and limit is not None:
            _log.warning(
                "%s: dropped %d prompts of over %d tokens (%s)", self._spec, self.dropped, limit.tokens, limit.reason
            )
        if not self._rows:
            raise UserError(f"{self._spec}: there are no rows")


def check_group_size(state: Mapping[str, Any], n_samples: int) -> None:
    """Groups that wait in a checkpoint have the size of the run that began them.

    Args:
        state: of the whole checkpoint, with those of data source and sampler.

    Raises:
        UserError: some wait, and groups have another size now.
    """
    source = state.get("source")
    if not isinstance(source, dict) or "n_samples" not in source:
        return  # a user's own source, or an older checkpoint
    waiting = len(source["buffer"]) + len((state.get("rollouts") or {}).get("groups", ()))
    saved = source["n_samples"]
    if waiting and saved != n_samples:
        raise UserError(
            f"--n-samples-per-prompt {n_samples}: {waiting} unfinished groups of the checkpoint have {saved} samples "
            f"each; give {saved}, or start anew from its weights by --ref-load without --load"
        )


def encoder_of(config: Config, tokenizer: Any) -> PromptEncoder:
    """The encoder that the flags describe."""
    data = config.data
    return PromptEncoder(
        tokenizer,
        apply_chat_template=data.apply_chat_template,
        template_kwargs=data.apply_chat_template_kwargs,
        tool_key=data.tool_key,
    )
