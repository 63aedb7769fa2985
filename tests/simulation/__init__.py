"""The real orchestration on a virtual clock, in a world made of one seed.

Real: the loops, ``vime.rollout`` and the data source, the flags and their rules, the reward hub, the client of the
router, fleet and supervision, weight sync and turns. Made up: processes of engines, router, trainer, graders, the
network between them, and everything that goes wrong with them. docs/en/advanced/simulator.md

* ``scenario``: seed → flags of a run, its engines and its faults.
* ``clock``: an event loop whose time jumps to the next timer.
* ``world``: chance by identity, the trace, and what became of the samples.
* ``engines``, ``servers``, ``trainer``, ``graders``: what is made up.
* ``episodes``: a user's generate function.
* ``run``: one run, with crashes of the driver and resumes from its last checkpoint.
* ``invariants``: what must hold of every run, whatever happened in it.
* ``check``: one seed → one line if something is wrong.
* ``bugs``: mistakes that are planted to see the invariants find them.

``python -m tests.simulation SEED --trace`` tells what happened in the world of a seed.
"""
