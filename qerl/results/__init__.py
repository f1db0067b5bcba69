"""The one contract of results: where files lie under results/, what they hold, and what is computed from them."""
