"""The real orchestration on a virtual clock, in a world made of one seed.

Real: the loops, the sampler, the buffer and the rest of ``vime.rollout``, the flags and their rules, the reward hub and
the order of a weight sync. Made up: engines, trainer, graders and everything that goes wrong with them.

* ``scenario``: seed → flags of a run, its engines and its faults.
* ``clock``: an event loop whose time jumps to the next timer.
* ``engines``, ``trainer``, ``graders``: the world behind ``vime.ports``.
* ``run``: one run, with crashes of the driver and resumes from its last checkpoint.
* ``invariants``: what must hold of every run, whatever happened in it.
* ``bugs``: mistakes that are planted to see the invariants find them.

``python -m tests.simulation SEED --trace`` tells what happened in the world of a seed.
"""
