"""The version of the package: its one home."""

from __future__ import annotations

VERSION = "0.1.0"
