"""Evaluation: lm-eval and lighteval over the project's own `Sampler`, so that every policy is scored the same way."""
