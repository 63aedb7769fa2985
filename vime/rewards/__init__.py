"""Rewards: graders, one a file, and where they run.

A reward is a ``Grade``: a score, or invalid, or an error. Rule graders are pure functions that may hang or crash, so
they run in ``GraderProcessPool``; ``hub`` decides which reward a sample gets.
"""

from vime.rewards.pool import GraderProcessPool

__all__ = ["GraderProcessPool"]
