"""The contract of results: paths and schemas of all files under results/, their writers and readers, and intervals."""
