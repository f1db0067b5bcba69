"""Problems with verifiable answers: records, sources, prompts and grading."""
