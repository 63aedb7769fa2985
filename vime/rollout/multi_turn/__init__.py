"""Episodes of several turns: the model speaks, the environment answers, and only what was sampled is trained."""
