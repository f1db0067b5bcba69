"""Tables and figures of stored results, as pure functions of the files that the workflow writes."""
