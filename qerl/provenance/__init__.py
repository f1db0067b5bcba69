"""The origin of results: the stamp, the version of the code, and files that are written completely or not at all."""
