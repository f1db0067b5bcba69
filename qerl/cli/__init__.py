"""The command line: commands for users, and the rules that the workflow calls."""
