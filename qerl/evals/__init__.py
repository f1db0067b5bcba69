"""Evaluation: lm-eval and lighteval over the project's own `Sampler`, so that every policy is scored the same way."""

#: What an evaluation writes: a row a completion, and last what came of them.
SAMPLES = "samples.jsonl"
RESULT = "result.json"
