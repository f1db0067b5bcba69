"""vLLM as a sampler, in this process or as a server, with synced adapter and norms."""
