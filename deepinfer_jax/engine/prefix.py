"""The exact prefix cache of one share: complete pages found by their content, and stored window states.

Separate because what outlives a request is nobody's business but its own: the scheduler asks for the
longest reusable prefix, and nothing here knows requests, slots or the device.

A page is named by a hash of its tokens and all tokens before, so that equal names mean equal prefixes. A
prefix can be reused only up to a *snapshot*: a stored copy of what a slot keeps besides its pages, taken
when exactly that many tokens were in its cache.
Read next: `pages.py` for who owns a page, and which one goes first.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import PAGE_TOKENS
from .pages import PageNode, PagePool, PageTree

SHORT = "short"
NEW = "new"
EVICTED = "evicted"
NO_SNAPSHOT = "no_snapshot"
PROMPT_LOGPROBS = "prompt_logprobs"
OFF = "off"
MISS_REASONS = (SHORT, NEW, EVICTED, NO_SNAPSHOT, PROMPT_LOGPROBS, OFF)
"""Why nothing was reused: no complete page before the last token, first page not here, first page evicted
lately, pages here but no usable snapshot, and the caller's own: prompt log-probabilities, cache off."""

KEY_BYTES = 16

REMEMBERED_EVICTIONS = 4096
"""Evicted pages remembered, to tell "evicted" from "new"."""


def page_keys(
    token_ids: Sequence[int] | np.ndarray, known: Sequence[bytes] = (), root: bytes = b""
) -> list[bytes]:
    """Name every complete page of a sequence by its content and all before it.

    key_i = BLAKE2b(key_{i-1}, tokens of page i as little-endian int32), with `root` before the first page.

    Args:
        token_ids: the sequence, ids below 2^31.
        known: keys of its first pages, computed earlier; only the others are computed.
        root: hash of whatever else determines the cache and is no token, such as the content of images;
            sequences with different roots share nothing.

    Returns:
        One key of 16 bytes for each complete page.
    """
    num_pages = len(token_ids) // PAGE_TOKENS
    assert len(known) <= num_pages
    keys = list(known)
    rest = np.asarray(token_ids[len(keys) * PAGE_TOKENS : num_pages * PAGE_TOKENS], "<i4")
    before = keys[-1] if keys else root
    for page in rest.reshape(-1, PAGE_TOKENS):
        before = hashlib.blake2b(before + page.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys


@dataclass(slots=True)
class PrefixCounters:
    """What a prefix cache did so far.

    Attributes:
        hits: requests that reused a prefix.
        hit_tokens: tokens that they reused.
        misses: requests that reused nothing, by reason, one of `MISS_REASONS`.
        stored_pages: pages that came in.
        evicted_pages: pages that gave way.
        stored_snapshots: snapshots that came in; one that is replaced by a better one counts once.
        evicted_snapshots: snapshots that gave way, alone or with their page.
    """

    hits: int = 0
    hit_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    stored_pages: int = 0
    evicted_pages: int = 0
    stored_snapshots: int = 0
    evicted_snapshots: int = 0

    @classmethod
    def total(cls, parts: Iterable[PrefixCounters]) -> PrefixCounters:
        """Add the counters of several caches.

        Args:
            parts: one of each share.

        Returns:
            New counters, which do not change with the parts.
        """
        result = cls()
        for part in parts:
            result.hits += part.hits
            result.hit_tokens += part.hit_tokens
            result.stored_pages += part.stored_pages
            result.evicted_pages += part.evicted_pages
            result.stored_snapshots += part.stored_snapshots
            result.evicted_snapshots += part.evicted_snapshots
            for reason, count in part.misses.items():
                result.misses[reason] = result.misses.get(reason, 0) + count
        return result


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a prompt that can be reused.

    Attributes:
        length: tokens, a multiple of `PAGE_TOKENS`; 0 for none.
        pages: their pages, in order.
        snapshot: index of the window state at `length`, None for none.
        reason: why `length` is 0, one of `MISS_REASONS`; None for a hit.
        num_matched: pages that are here within the limit, with or without a snapshot: a snapshot taken at
            their end would have served this prompt.
    """

    length: int
    pages: tuple[int, ...]
    snapshot: int | None
    reason: str | None
    num_matched: int


class PrefixCache:
    """Pages and snapshots of one share, kept for requests to come until room is needed.

    Args:
        pool: pages of the share; the cache owns each page it keeps once, and watches the pool.
        first_snapshot: index of the share's first snapshot.
        num_snapshots: snapshots of the share, 0 or more.
    """

    def __init__(self, pool: PagePool, first_snapshot: int, num_snapshots: int) -> None:
        assert first_snapshot >= 0 and num_snapshots >= 0
        self.counters = PrefixCounters()
        self._pool = pool
        self._tree = PageTree(pool)
        self._snapshots = range(first_snapshot, first_snapshot + num_snapshots)
        self._free_snapshots = list(self._snapshots)
        # Least recently used first.
        self._node_of_snapshot: dict[int, PageNode] = {}
        self._evicted_keys: dict[bytes, None] = {}
        self._promises: Counter[bytes] = Counter()

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now; kept up to date with every change, so asking costs nothing."""
        return self._tree.num_evictable

    def num_evictable_beside(self, match: PrefixMatch) -> int:
        """Count the pages that `evict` could still free once a match is in use.

        Args:
            match: of this cache, not used yet.

        Returns:
            Number of pages.
        """
        return self.num_evictable - sum(not self._tree.at(page).num_busy for page in match.pages)

    def match(self, keys: Sequence[bytes], limit: int, decoder_start: int | None = None) -> PrefixMatch:
        """Find the longest prefix that can be reused; changes nothing.

        Args:
            keys: of the prompt's complete pages.
            limit: most tokens to reuse: one less than the prompt has, so that a complete hit still
                computes a token.
            decoder_start: in a bounded prefill the first position that the decoder half sees, where no
                decoder windows are needed before and none help after; None for an exact prefill, which
                needs the windows of both halves.

        Returns:
            The match, valid until the cache changes.
        """
        most = min(len(keys), limit // PAGE_TOKENS)
        if most <= 0:
            return PrefixMatch(0, (), None, SHORT, 0)
        pages: list[int] = []
        usable = 0, None
        for key in keys[:most]:
            node = self._tree.find(key)
            if node is None:
                break
            pages.append(node.page)
            length = len(pages) * PAGE_TOKENS
            is_usable = node.has_decoder if decoder_start is None else length <= decoder_start
            if node.snapshot is not None and is_usable:
                usable = len(pages), node.snapshot
        count, snapshot = usable
        if count:
            return PrefixMatch(count * PAGE_TOKENS, tuple(pages[:count]), snapshot, None, len(pages))
        missing = EVICTED if keys[0] in self._evicted_keys else NEW
        return PrefixMatch(0, (), None, NO_SNAPSHOT if pages else missing, len(pages))

    def use(self, match: PrefixMatch) -> None:
        """Reuse a match for a request that is admitted: count it, and hold its pages for the request.

        What the device writes to the match's snapshot later must be dispatched after the request's read.

        Args:
            match: the answer for this request, with no change of the cache since.
        """
        if not match.length:
            assert match.reason is not None
            self.count_miss(match.reason)
            return
        node = self._tree.at(match.pages[-1])
        assert match.snapshot is not None and node.snapshot == match.snapshot, "the match is out of date"
        self._pool.hold(match.pages)
        self._tree.touch(node)
        self._node_of_snapshot[match.snapshot] = self._node_of_snapshot.pop(match.snapshot)
        self.counters.hits += 1
        self.counters.hit_tokens += match.length

    def count_miss(self, reason: str) -> None:
        """Count a request that reuses nothing.

        Args:
            reason: one of `MISS_REASONS`.
        """
        assert reason in MISS_REASONS, reason
        self.counters.misses[reason] = self.counters.misses.get(reason, 0) + 1

    def store(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Keep the complete pages of a sequence, from its first on; what is here already keeps its page.

        Args:
            keys: of the pages, the first ones of the sequence.
            pages: at least as many, owned by the caller and written; further ones are ignored.
        """
        assert len(pages) >= len(keys)
        if keys:
            self.counters.stored_pages += self._tree.add(keys, pages)

    def save_snapshot(self, keys: Sequence[bytes], has_decoder: bool) -> int | None:
        """Say where to store the window state of a sequence at the end of its last key's page.

        Args:
            keys: of all pages before that boundary, at least one; `store` comes first.
            has_decoder: whether the decoder half's windows are part of the state, as an exact prefill makes
                them; windows made of the last tokens alone do not count.

        Returns:
            Index of the snapshot to write; None where nothing should be written: one as good is there,
            the page is not here any more, or there are no snapshots.
        """
        node = self._tree.find(keys[-1])
        if node is None or not self._snapshots:
            return None
        if node.snapshot is not None:
            if node.has_decoder or not has_decoder:
                return None
            snapshot = node.snapshot
            del self._node_of_snapshot[snapshot]
        else:
            if not self._free_snapshots:
                self._drop_snapshot(next(iter(self._node_of_snapshot.values())))
            snapshot = heapq.heappop(self._free_snapshots)
            self.counters.stored_snapshots += 1
        node.snapshot, node.has_decoder = snapshot, has_decoder
        self._node_of_snapshot[snapshot] = node
        return snapshot

    def evict(self, count: int) -> int:
        """Free pages that only the cache owns, least recently used first, a page after all pages below it.

        Args:
            count: pages to free at most.

        Returns:
            Pages freed.
        """
        removed = self._tree.evict(count)
        for node in removed:
            self._drop_snapshot(node)
            self._evicted_keys.pop(node.key, None)
            self._evicted_keys[node.key] = None
            if len(self._evicted_keys) > REMEMBERED_EVICTIONS:
                del self._evicted_keys[next(iter(self._evicted_keys))]
        self.counters.evicted_pages += len(removed)
        return len(removed)

    def drop(self) -> None:
        """Forget every page and snapshot, and what was evicted; counters and promises stay."""
        self._tree.clear()
        self._free_snapshots = list(self._snapshots)
        self._node_of_snapshot.clear()
        self._evicted_keys.clear()

    def promise(self, key: bytes) -> None:
        """Announce a boundary that a running request will store soon; several may announce the same.

        Args:
            key: of the page that ends there.
        """
        self._promises[key] += 1

    def withdraw(self, key: bytes) -> None:
        """Take one promise back, kept or not.

        Args:
            key: as promised.
        """
        assert self._promises[key] > 0, "withdrawn more often than promised"
        self._promises[key] -= 1
        if not self._promises[key]:
            del self._promises[key]

    def is_promised(self, key: bytes) -> bool:
        """Tell whether a running request will store this boundary."""
        return key in self._promises

    def longest_promise(self, keys: Sequence[bytes], limit: int) -> int:
        """Find the longest prefix that a running request will store.

        Args:
            keys: of a prompt's complete pages.
            limit: most tokens of interest.

        Returns:
            Tokens, 0 for none.
        """
        for count in range(min(len(keys), limit // PAGE_TOKENS), 0, -1):
            if keys[count - 1] in self._promises:
                return count * PAGE_TOKENS
        return 0

    def _drop_snapshot(self, node: PageNode) -> None:
        if node.snapshot is not None:
            del self._node_of_snapshot[node.snapshot]
            heapq.heappush(self._free_snapshots, node.snapshot)
            node.snapshot, node.has_decoder = None, False
            self.counters.evicted_snapshots += 1
