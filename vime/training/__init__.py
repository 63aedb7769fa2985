"""Training on Megatron-core: the model, its passes over packed samples, the optimizer step, and the worker around them.

Nothing here knows Ray. ``worker.TrainWorker`` is the way in.
"""
