"""The KV pages: a holder count per page, and the free ones. Knows page numbers, not tensors.

A page is shared by the sequences that read it and by the prefix cache. Only the sequence that
took it writes into it, and only while it is the only holder. Page 0 has no holder: blank rows write there.
"""

__all__ = ["SCRATCH_PAGE", "PagePool"]

SCRATCH_PAGE = 0


class PagePool:
    """Pages 1 .. num_pages with the number of their holders."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_changes = 0
        """How often a page gained or lost a holder: without such a change no page can have become free."""
        self.num_cached_only = 0
        """Pages that the prefix cache holds and nobody else: evicting it frees them."""
        self._holders = [0] * (num_pages + 1)
        self._is_cached = [False] * (num_pages + 1)
        # The lowest numbers are taken first, so that a lightly used pool stays in one part of the memory.
        self._free = list(range(num_pages, SCRATCH_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def num_readers(self, page: int) -> int:
        """Holders other than the prefix cache."""
        return self._holders[page] - self._is_cached[page]

    def take(self, count: int) -> list[int]:
        """Takes pages, with one holder each. The caller has checked that so many are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages were taken where {len(self._free)} are free.")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Adds a holder."""
        if not self._holders[page]:
            raise RuntimeError(f"Page {page} is free; it cannot be shared.")
        self.num_cached_only -= self._is_cached[page] and self._holders[page] == 1
        self._holders[page] += 1
        self.num_changes += 1

    def give_back(self, page: int) -> None:
        """Removes a holder; the page is free after the last."""
        if not self._holders[page]:
            raise RuntimeError(f"Page {page} was given back twice.")
        self._holders[page] -= 1
        self.num_changes += 1
        self.num_cached_only += self._is_cached[page] and self._holders[page] == 1
        if not self._holders[page]:
            self._free.append(page)

    def share_with_cache(self, page: int) -> None:
        """Adds the prefix cache as a holder."""
        if self._is_cached[page]:
            raise RuntimeError(f"Page {page} is in the prefix cache twice.")
        self.share(page)
        self._is_cached[page] = True

    def give_back_from_cache(self, page: int) -> None:
        """Removes the prefix cache as a holder."""
        if not self._is_cached[page]:
            raise RuntimeError(f"Page {page} is not in the prefix cache.")
        self.num_cached_only -= self._holders[page] == 1
        self._is_cached[page] = False
        self.give_back(page)

    def check(self, holders: dict[int, int]) -> None:
        """Raises unless every page has exactly this many holders (page -> count)."""
        for page in range(1, self.num_pages + 1):
            if self._holders[page] != holders.get(page, 0):
                raise RuntimeError(
                    f"Page {page} counts {self._holders[page]} holders where {holders.get(page, 0)} are known."
                )
        cached_only = sum(self._is_cached[page] and self._holders[page] == 1 for page in range(1, self.num_pages + 1))
        if cached_only != self.num_cached_only:
            raise RuntimeError(
                f"Of {cached_only} pages that the prefix cache alone holds {self.num_cached_only} count."
            )
        free = sorted(self._free)
        if free != [page for page in range(1, self.num_pages + 1) if not self._holders[page]]:
            raise RuntimeError("The list of free pages does not agree with the pages' holders.")
