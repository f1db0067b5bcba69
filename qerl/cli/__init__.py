"""The command line: commands for people, and the rules that the workflow calls."""
