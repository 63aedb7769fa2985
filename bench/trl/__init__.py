"""TRL's GRPOTrainer as the reference of a whole GRPO step. Runs in its own virtual environment, made by setup.sh."""
