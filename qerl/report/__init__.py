"""Tables and figures of stored results: pure functions of the files that the workflow writes."""
