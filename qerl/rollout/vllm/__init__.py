"""vLLM as a sampler: in this process or as a server, with adapter and norms kept in step."""
