"""How the trainer's weights reach the engines: the plan, the shared memory, the sync, the proof of arrival."""
