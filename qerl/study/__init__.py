"""The exploration study: data, comparisons, tables, figures and page (docs/exploration-protocol.md)."""
