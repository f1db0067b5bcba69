"""Where a result comes from: its stamp, the version of the code, and files that are written whole or not at all."""
