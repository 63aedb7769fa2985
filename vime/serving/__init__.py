"""The engines (vLLM servers), the router in front of them, and how to talk to both."""
