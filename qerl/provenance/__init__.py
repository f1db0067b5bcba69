"""The origin of results: stamp, code version, and files that are written completely or not at all."""
