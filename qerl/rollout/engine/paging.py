"""The KV cache's pages: their reference counts, kept on the host, and the slots that memory has room for."""

from __future__ import annotations

from collections.abc import Sequence


class Pages:
    """`count` pages of `size` tokens with reference counts. Page 0 is reserved for writes that nobody reads."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.count = count
        self._holders = [0] * count
        self._free = list(range(count - 1, 0, -1))

    @property
    def available(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Number of pages that hold `tokens`."""
        return -(-tokens // self.size)

    def take(self, number: int) -> list[int]:
        """`number` free pages, each with one holder. Raises RuntimeError if fewer are free; callers check that
        first.
        """
        if number > self.available:
            raise RuntimeError(f"{number} pages of the KV cache are requested, but only {self.available} are free")
        taken = [self._free.pop() for _ in range(number)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add a holder to the pages."""
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a holder from the pages. Pages without a holder are free again."""
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, page: int) -> None:
        if not self._holders[page]:
            raise RuntimeError(f"page {page} of the KV cache has no holder")


def slots_for(room: int, sequences: int, alone: int, page: int, state: int) -> int:
    """Slots of a pool in `room` bytes: one for each of the `sequences`, or fewer if they have states of `state` bytes.

    Each slot then also has the pages of the longest sequence, so that no sequence waits for pages. `alone` are the
    pages that it needs in an empty cache, and `page` the bytes of a page.
    """
    if not state:
        return sequences
    return max(1, min(sequences, (room - 2 * state - alone * page) // (state + (alone - 1) * page)))
