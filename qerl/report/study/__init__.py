"""A study's data, comparisons, tables, figures and page (docs/exploration-protocol.md)."""
