"""The layers that vime puts into Megatron's decoder: norm, attention with rotary positions, log-prob head."""
