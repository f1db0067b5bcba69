"""Seeds of vLLM's requests."""

import numpy as np


def prompt_seed(seed: int, prompt: int) -> int:
    """A seed of 62 bits for a prompt of the batch; vLLM adds the index of the completion to it."""
    return int(np.random.SeedSequence([seed, prompt]).generate_state(1, np.uint64)[0]) >> 2
