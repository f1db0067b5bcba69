"""The workflow: plans of a configuration, their jobs, files and cost, and the preparation of runs."""
