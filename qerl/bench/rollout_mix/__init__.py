"""End-to-end time of rollouts whose completions have mixed lengths, by the project's samplers and by vLLM."""
