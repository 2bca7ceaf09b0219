"""The prefix cache: which prompt prefixes can be reused, and what is evicted first.

A prefix of a hybrid model can be reused where all of it is saved at one position: the KV pages up to it, the DeltaNet
state and the last hidden vector. Pages form a tree, one node per page, keyed by the page's tokens; a node may have a
checkpoint, the number of a state that was saved at its end. Every leaf has one: pages that lead to no checkpoint are
useless.

Only what prefill computed is cached. What decoding computed differs in the last bits, so it is recomputed when it comes
back as history. Knows numbers, not tensors: the runner copies the state of a checkpoint's number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.engine.pages import PagePool
from onebox.engine.request import CacheTier
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["Hit", "PrefixCache", "PrefixLookup", "PrefixStats", "UnwrittenPrefix"]


class PrefixLookup(NamedTuple):
    """What a request with this prompt would find cached if it were admitted now."""

    memory_tokens: int = 0
    disk_tokens: int = 0
    """Above 0 only where they are more than memory's and reading them beats computing the rest."""

    @property
    def cached_tokens(self) -> int:
        return max(self)

    @property
    def tier(self) -> CacheTier | None:
        """Memory's, where both hold the same."""
        if self.cached_tokens == 0:
            return None
        return CacheTier.DISK if self.disk_tokens > self.memory_tokens else CacheTier.MEMORY


@dataclass
class _Node:
    """One page of a prefix. The root has none."""

    parent: "_Node | None"
    tokens: tuple[int, ...]
    page: int
    depth: int
    """Pages up to the end of this one."""
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    checkpoint: int | None = None
    last_used: int = 0
    is_pinned: bool = False
    unwritten_as: int | None = None
    """Its number among the prefixes that have yet to be written to disk."""


@dataclass(frozen=True)
class UnwrittenPrefix:
    """A cached prefix that is not on disk yet."""

    number: int
    """Unlike the checkpoint's, never another's."""
    page_tokens: list[tuple[int, ...]]
    pages: tuple[int, ...]
    checkpoint: int
    is_pinned: bool


@dataclass(frozen=True)
class Hit:
    """The longest reusable prefix of a prompt."""

    num_tokens: int
    pages: tuple[int, ...]
    checkpoint: int


@dataclass(frozen=True)
class PrefixStats:
    """Totals since the start; numbers of checkpoints, pages and pins are current."""

    queried_tokens: int
    hit_tokens: int
    saved: int
    evicted: int
    num_checkpoints: int
    num_pages: int
    num_pinned: int
    num_hits: int = 0
    """A total, too: prompts that were admitted with a cached prefix."""


class PrefixCache:
    """A tree of pages with at most `num_checkpoints` checkpoints, numbered from 0; evicts the least recently used."""

    def __init__(self, pool: PagePool, num_checkpoints: int, *, with_disk: bool = False) -> None:
        """With a disk, what is inserted counts as unwritten until `mark_written`, and is evicted after the rest."""
        self._pool = pool
        self._with_disk = with_disk
        self._unwritten: dict[int, _Node] = {}
        """By their numbers, in the order in which they are to be written."""
        self.writing: int | None = None
        """The number of the one that is being written: evicting it loses nothing."""
        self._held: set[int] = set()
        """Numbers that are being copied: not free, even where their prefix was evicted."""
        self.num_dropped = 0
        """Prefixes that were evicted before they were written."""
        self._root = _Node(None, (), 0, 0)
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._num_checkpoints = num_checkpoints
        self._owners: dict[int, _Node] = {}
        self._reserved: set[int] = set()
        self._clock = 0
        self._num_pages = self._num_pinned = 0
        self._queried_tokens = self._num_hits = self._hit_tokens = self._saved = self._evicted = 0

    def find(self, prompt: tuple[int, ...]) -> Hit | None:
        """The deepest checkpoint on the prompt's path that leaves at least one token to compute."""
        best = None
        for node in self._path(prompt[: len(prompt) - 1]):
            if node.checkpoint is not None:
                best = node
        if best is None or best.checkpoint is None:
            return None
        return Hit(best.depth * PAGE_TOKENS, tuple(node.page for node in self._up(best))[::-1], best.checkpoint)

    def pages_on_path(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The cached pages of the tokens, from the first on: some may lead beyond the last checkpoint."""
        return tuple(node.page for node in self._path(tokens))

    def peek(self, prompt: tuple[int, ...]) -> int:
        """Tokens that `find` would find. Changes nothing, and may be called by any thread.

        It reads one dict entry and one attribute at a time: beside a change, some of the result is from before it.
        """
        path = self._path(prompt[: len(prompt) - 1])
        return max((node.depth * PAGE_TOKENS for node in path if node.checkpoint is not None), default=0)

    def touch(self, prompt: tuple[int, ...], hit: Hit | None) -> None:
        """Counts a prompt that was admitted with this result of `find`, and marks the hit as just used."""
        self._queried_tokens += len(prompt)
        if hit:
            self._num_hits += 1
            self._hit_tokens += hit.num_tokens
            # Freeing pages for the prompt may have evicted the hit; the prompt itself then holds its pages.
            if hit.checkpoint in self._owners:
                self._use(self._owners[hit.checkpoint])

    def has_checkpoint(self, prompt: tuple[int, ...], num_tokens: int) -> bool:
        """Whether the state after the first `num_tokens` tokens is cached already."""
        node = next((n for n in self._path(prompt) if n.depth * PAGE_TOKENS == num_tokens), None)
        return node is not None and node.checkpoint is not None

    def pin(self, prompt: tuple[int, ...], num_tokens: int) -> None:
        """Keeps the state after the first `num_tokens` tokens, if cached, until nothing else is left to evict."""
        for node in self._path(prompt):
            if node.depth * PAGE_TOKENS == num_tokens and node.checkpoint is not None:
                self._pin(node)

    def reserve(self) -> int | None:
        """A checkpoint number to save a state under, evicting the least recently used one if none is free."""
        if not self._free:
            oldest = self._oldest()
            if oldest is None:
                return None
            self._evict(oldest)
        number = self._free.pop()
        self._reserved.add(number)
        return number

    def cancel(self, checkpoint: int) -> None:
        """Frees a reserved number under which nothing was saved."""
        self._reserved.remove(checkpoint)
        self._free.append(checkpoint)

    def insert(
        self,
        tokens: tuple[int, ...],
        pages: Sequence[int],
        checkpoint: int,
        *,
        is_pinned: bool,
        is_written: bool = False,
    ) -> None:
        """Adds the prefix `tokens`, whole pages, whose state was saved under the reserved number.

        `is_written`: it came from disk.
        """
        node = self._root
        for depth, page in enumerate(pages, start=1):
            key = tokens[(depth - 1) * PAGE_TOKENS : depth * PAGE_TOKENS]
            child = node.children.get(key)
            if child is None:
                # Where another request computed the page before, that one is kept: the bits are equal.
                self._pool.share_with_cache(page)
                child = node.children[key] = _Node(node, key, page, depth)
                self._num_pages += 1
            node = child
        self._reserved.remove(checkpoint)
        if node.checkpoint is None:
            node.checkpoint = checkpoint
            self._owners[checkpoint] = node
            self._saved += 1
            if self._with_disk and not is_written:
                node.unwritten_as = self._saved
                self._unwritten[self._saved] = node
        else:
            self._free.append(checkpoint)
        if is_pinned:
            self._pin(node)
        self._use(node)

    def free_pages(self, count: int) -> bool:
        """Evicts until the pool has `count` free pages; nothing is evicted where that would not be enough."""
        if self._pool.num_free + self._pool.num_cached_only < count:
            return False
        while self._pool.num_free < count:
            self._evict(self._freeing())
        return True

    def discard(self, prompt: tuple[int, ...]) -> None:
        """Evicts every checkpoint on the prompt's path: one of their states may not be finite."""
        for node in [node for node in self._path(prompt) if node.checkpoint is not None]:
            self._evict(node)

    def clear(self) -> None:
        """Evicts everything."""
        for node in [*self._owners.values()]:
            self._evict(node)

    def next_unwritten(self, *, is_last: bool = False) -> UnwrittenPrefix | None:
        """The first of the prefixes that are not on disk yet, or the last."""
        number = next(reversed(self._unwritten) if is_last else iter(self._unwritten), None)
        if number is None:
            return None
        path = [*self._up(self._unwritten[number])][::-1]
        checkpoint, pages = path[-1].checkpoint, tuple(node.page for node in path)
        if checkpoint is None:
            raise RuntimeError("A prefix without a checkpoint has yet to be written.")
        return UnwrittenPrefix(number, [node.tokens for node in path], pages, checkpoint, path[-1].is_pinned)

    def is_unwritten(self, number: int) -> bool:
        return number in self._unwritten

    def mark_written(self, number: int) -> None:
        """It is on disk, or not worth it; one that was evicted meanwhile is ignored."""
        node = self._unwritten.pop(number, None)
        if node:
            node.unwritten_as = None

    def put_off(self, number: int) -> None:
        """It is written after the others; one that was evicted meanwhile is ignored."""
        if number in self._unwritten:
            self._unwritten[number] = self._unwritten.pop(number)

    def hold(self, checkpoint: int) -> None:
        """Keeps a cached state's number from being given to another until `release`."""
        self._held.add(checkpoint)

    def release(self, checkpoint: int) -> None:
        self._held.remove(checkpoint)
        if checkpoint not in self._owners:
            self._free.append(checkpoint)

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(
            self._queried_tokens,
            self._hit_tokens,
            self._saved,
            self._evicted,
            len(self._owners),
            self._num_pages,
            self._num_pinned,
            self._num_hits,
        )

    def holders(self) -> Iterator[int]:
        """The page of every node."""
        return (node.page for node in self._nodes())

    @property
    def reserved(self) -> frozenset[int]:
        """The numbers that are reserved and not yet used."""
        return frozenset(self._reserved)

    def check(self) -> None:
        """Raises unless each number is free, reserved or owned once and the tree is consistent with its counts."""
        numbers = sorted([*self._free, *self._reserved, *{*self._owners, *self._held}])
        if numbers != list(range(self._num_checkpoints)):
            raise RuntimeError(f"Checkpoints are lost or held twice: {numbers}.")
        nodes = list(self._nodes())
        counted = len(nodes), sum(node.is_pinned for node in nodes)
        if counted != (self._num_pages, self._num_pinned):
            raise RuntimeError(f"Of {counted} cached and pinned pages {self._num_pages, self._num_pinned} are counted.")
        for node in nodes:
            if not node.children and node.checkpoint is None:
                raise RuntimeError(f"The cached page {node.page} leads to no checkpoint.")
            if node.checkpoint is not None and self._owners.get(node.checkpoint) is not node:
                raise RuntimeError(f"Checkpoint {node.checkpoint} does not know its page {node.page}.")
        for number, node in self._unwritten.items():
            if node.unwritten_as != number or node.checkpoint not in self._owners:
                raise RuntimeError(f"Prefix {number} was evicted and has yet to be written.")

    def _path(self, tokens: tuple[int, ...]) -> Iterator[_Node]:
        """The cached nodes of the tokens' whole pages, from the first on."""
        node = self._root
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            child = node.children.get(tokens[start : start + PAGE_TOKENS])
            if child is None:
                return
            node = child
            yield node

    def _up(self, node: _Node) -> Iterator[_Node]:
        """The node and those before it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def _pin(self, node: _Node) -> None:
        self._num_pinned += not node.is_pinned
        node.is_pinned = True

    def _use(self, node: _Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _by_age(self) -> list[_Node]:
        """The nodes with a checkpoint: the least recently used first, those not on disk yet later, pinned ones last."""
        return sorted(self._owners.values(), key=_age)

    def _oldest(self) -> _Node | None:
        """The first of these whose number can be given to another."""
        return min((node for number, node in self._owners.items() if number not in self._held), key=_age, default=None)

    def _freeing(self) -> _Node:
        """The least recently used checkpoint whose eviction frees a page, pinned ones last.

        Only a leaf's eviction gives pages back, those that lead to no other checkpoint; running sequences may hold them
        all. Where that is so for every leaf, a leaf on the way to a page that the cache alone holds.
        """
        leaves = [node for node in self._by_age() if not node.children]
        for node in leaves:
            if not node.is_pinned and any(self._pool.num_readers(n.page) == 0 for n in self._branch(node)):
                return node
        for node in leaves:
            if any(self._pool.num_readers(n.page) == 0 for n in self._up(node)):
                return node
        raise RuntimeError("The cache holds pages alone and none of its checkpoints leads to them.")

    def _branch(self, leaf: _Node) -> Iterator[_Node]:
        """The nodes that lead to this leaf and to no other checkpoint, from the leaf on."""
        for node in self._up(leaf):
            if node is not leaf and (node.checkpoint is not None or len(node.children) > 1):
                return
            yield node

    def _evict(self, node: _Node) -> None:
        """Evicts a node's checkpoint, and the pages that then lead to none."""
        self._num_pinned -= node.is_pinned
        checkpoint, node.checkpoint, node.is_pinned = node.checkpoint, None, False
        if checkpoint is None:
            raise RuntimeError("A node without a checkpoint is registered as the owner of one.")
        del self._owners[checkpoint]
        if checkpoint not in self._held:
            self._free.append(checkpoint)
        self._evicted += 1
        if node.unwritten_as is not None:
            self.num_dropped += node.unwritten_as != self.writing
            self.mark_written(node.unwritten_as)
        while node.parent is not None and not node.children and node.checkpoint is None:
            self._pool.give_back_from_cache(node.page)
            del node.parent.children[node.tokens]
            self._num_pages -= 1
            node = node.parent


def _age(node: _Node) -> tuple[bool, bool, int]:
    return node.is_pinned, node.unwritten_as is not None, node.last_used
