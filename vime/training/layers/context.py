"""Context parallelism: which tokens of a pack each rank has, and what the ranks tell each other.

The pack (not each sequence) is cut into 2n chunks for n ranks; rank r has chunks r and 2n - 1 - r. Under causal
attention late tokens see more than early ones, so every rank gets of both and all have about the same work.

Shape suffixes: l tokens of the pack, t response tokens of the micro-batch, p those that this rank predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ContextPart", "assemble", "gather_parts"]


@dataclass(frozen=True, slots=True)
class ContextPart:
    """The place of this rank among those that share each pack."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = field(default=None, compare=False)  # None: nothing is exchanged

    @property
    def multiple(self) -> int:
        """What the number of tokens of a pack must be a multiple of."""
        return 2 * self.size

    def ranges(self, total: int) -> tuple[range, range]:
        """The tokens that this rank has of a pack of ``total``: an early chunk and a late one."""
        chunk = total // self.multiple
        assert chunk * self.multiple == total, f"{total} tokens cannot be cut into {self.multiple} chunks"
        early, late = self.rank * chunk, (self.multiple - 1 - self.rank) * chunk
        return range(early, early + chunk), range(late, late + chunk)

    def tokens(self, total: int) -> Tensor:
        """Those as int64 [l / n], in the order in which this rank has them."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.ranges(total)])

    def places(self, total: int) -> Tensor:
        """Where each token of the pack is once the parts of all ranks stand one after the other, int64 [l]."""
        parts = [ContextPart(rank, self.size).tokens(total) for rank in range(self.size)]
        return torch.cat(parts).argsort()


class _GatherParts(torch.autograd.Function):
    """The parts of all ranks, one after the other. Each rank uses all of them, so backward adds up and scatters."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.new_empty(len(gradient) // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None


def gather_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[l / n, …] of each rank → [l, …] on all of them, in the order of the ranks; collective, backward too."""
    whole: Tensor = _GatherParts.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _Assemble(torch.autograd.Function):
    """Every rank goes on with the same whole and computes the same loss, so backward takes the own columns out."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, total: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(len(values), total).index_copy_(1, own, values)
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient.index_select(1, own), None, None, None


def assemble(values_p: Tensor, own_p: Tensor, total: int, group: dist.ProcessGroup | None) -> Tensor:
    """What each rank knows of its response tokens, [k, p] → of all of them, [k, t], on every rank.

    It is 0 for a token that none knows.

    The gradient that a rank propagates is that of its own tokens only; those of all ranks add up to the whole.

    Args:
        own_p: int64, which of the ``total`` tokens they are.
        group: the ranks that know others; None when there are none.
    """
    whole: Tensor = _Assemble.apply(values_p, own_p, total, group)  # type: ignore[no-untyped-call]
    return whole
