"""From stored results to tables and figures: pure functions over the files that the workflow writes."""
