"""What a run tells: metrics, samples, curves, progress on the terminal, and where the time went.

Nothing here decides anything about training, and nothing here may end a run: only the run's own files (metrics.jsonl,
samples, run_config.json) raise when they cannot be written. Clocks are passed in.
"""
