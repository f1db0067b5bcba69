"""The study of dose and response: data, comparisons, figure and page (docs/dose-protocol.md)."""
