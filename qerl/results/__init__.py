"""The contract of results: places and schemas of all files under results/, their writers and readers, and intervals."""
