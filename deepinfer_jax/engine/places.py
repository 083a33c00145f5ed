"""Slots, pages and reuse: where requests run and what they leave behind.

Separate from `scheduler.py` because it decides nothing: it finds room, gives it, and takes it back. No JAX.
Read next: `pages.py`, `prefix.py`.
"""

from __future__ import annotations

import enum

import numpy as np

from ..config import NOTHING, PAGE_TOKENS, CacheConfig
from .pages import PagePool
from .prefix import OFF, PROMPT_LOGPROBS, PrefixCache, PrefixCounters, PrefixMatch
from .request import Phase, Request, num_pages


class Entry(enum.Enum):
    """Whether a request got a slot: yes, no room, or a running request will soon have its prefix."""

    ENTERED = "entered"
    FULL = "full"
    LATER = "later"


class Places:
    """Slots and pages of an engine, divided over shares.

    Attributes:
        running: requests by slot.
        page_table: int32 [B, pages of a slot], NOTHING where a slot has none.
        has_changed: whether the table changed; the scheduler sets it back.

    Args:
        sizes: of the cache, over all devices.
        num_snapshots: over all devices; 0 for no prefix cache.
        num_shares: devices, or groups of them, that have slots of their own.
    """

    def __init__(self, sizes: CacheConfig, num_snapshots: int, num_shares: int) -> None:
        self.num_shares, self.has_cache = num_shares, num_snapshots > 0
        self.slots_each = sizes.num_slots // num_shares
        self.pages_each = sizes.num_pages // num_shares
        each = num_snapshots // num_shares
        self.pools = [PagePool(share * self.pages_each, self.pages_each) for share in range(num_shares)]
        self.caches = [PrefixCache(pool, share * each, each) for share, pool in enumerate(self.pools)]
        self.running: dict[int, Request] = {}
        self.page_table = np.full((sizes.num_slots, sizes.pages_per_slot), NOTHING, np.int32)
        self.has_changed = False

    @property
    def counters(self) -> PrefixCounters:
        """What the prefix caches of all shares counted."""
        return PrefixCounters.total([cache.counters for cache in self.caches])

    @property
    def num_pages_used(self) -> int:
        """Pages that requests or the prefix cache hold."""
        return sum(pool.num_pages - pool.num_free for pool in self.pools)

    def share_of(self, slot: int) -> int:
        """Give the share that a slot belongs to."""
        return slot // self.slots_each

    def in_order(self) -> list[Request]:
        """List running requests in the order of arrival."""
        return sorted(self.running.values(), key=lambda request: request.number)

    def latest_beside(self, request: Request) -> Request:
        """Give the request of the same share that arrived last."""
        share = self.share_of(request.slot)
        return max(
            (one for slot, one in self.running.items() if self.share_of(slot) == share),
            key=lambda one: one.number,
        )

    def enter(self, request: Request) -> Entry:
        """Give a request a slot and the pages of what it has to run, if there is room.

        Args:
            request: a waiting one.

        Returns:
            Whether it entered, finds no room, or should wait for a prefix.
        """
        if len(self.running) == len(self.page_table):
            return Entry.FULL
        matches = {share: self._match(request, share) for share in range(self.num_shares)}
        best = max(match.length for match in matches.values())
        if self._promised(request) > best:
            return Entry.LATER
        # Most of it there already, else where most slots are free.
        order = sorted(matches, key=lambda share: (-matches[share].length, -self._num_free(share), share))
        for share in order:
            if self._num_free(share) and self._has_room(request, share, matches[share]):
                self._place(request, share, matches[share])
                return Entry.ENTERED
        return Entry.FULL

    def grow(self, request: Request, num_positions: int) -> bool:
        """Give a request the pages of its first positions, if they are there.

        Args:
            request: a running one.
            num_positions: that must have pages.

        Returns:
            Whether it has the pages.
        """
        first, missing = len(request.pages), num_pages(num_positions) - len(request.pages)
        if missing <= 0:
            return True
        share = self.share_of(request.slot)
        if not self._free(share, missing):
            return False
        request.pages += self.pools[share].take(missing)
        self.page_table[request.slot, first : len(request.pages)] = request.pages[first:]
        self.has_changed = True
        return True

    def save(self, request: Request, boundary: int) -> list[tuple[int, int]]:
        """Keep the window state at a page boundary for reuse.

        Args:
            request: one whose slot holds that state, whatever it holds besides.
            boundary: a multiple of `PAGE_TOKENS`.

        Returns:
            (snapshot, slot) to copy, or nothing.
        """
        has_decoder = request.decoder_start == 0
        if not self.has_cache or not boundary or (boundary > request.decoder_start and not has_decoder):
            return []
        request.num_saved = boundary
        cache, keys = self.caches[self.share_of(request.slot)], request.keys(boundary)
        cache.store(keys, request.pages[: len(keys)])
        if keys[-1] in request.promised:
            request.promised.remove(keys[-1])
            cache.withdraw(keys[-1])
        snapshot = cache.save_snapshot(keys, has_decoder)
        return [] if snapshot is None else [(snapshot, request.slot)]

    def leave(self, request: Request) -> None:
        """Take a request's slot and pages; complete pages stay for reuse as long as nothing needs them."""
        share = self.share_of(request.slot)
        cache = self.caches[share]
        for key in request.promised:
            cache.withdraw(key)
        request.promised = []
        if self.has_cache:
            # A row that was given to the devices but not run has a token that is not known.
            keys = request.keys(min(request.num_computed, request.num_known))
            cache.store(keys, request.pages[: len(keys)])
        self.pools[share].release(request.pages)
        del self.running[request.slot]
        self.page_table[request.slot] = NOTHING
        self.has_changed = True
        request.pages, request.slot, request.num_computed = [], NOTHING, 0

    def forget(self) -> None:
        """Forget all that is kept for reuse."""
        for cache in self.caches:
            cache.drop()

    def _num_free(self, share: int) -> int:
        """Count the free slots of a share."""
        return self.slots_each - sum(self.share_of(slot) == share for slot in self.running)

    def _match(self, request: Request, share: int) -> PrefixMatch:
        """Find what is there of a request's tokens but the last, which always runs again."""
        if self._reason_to_skip(request) is not None:
            return PrefixMatch(length=0, pages=(), snapshot=None, reason=None, num_matched=0)
        limit = request.num_known - 1
        start = request.decoder_start or None
        return self.caches[share].match(request.keys(limit), limit, start)

    def _reason_to_skip(self, request: Request) -> str | None:
        if not self.has_cache or request.sequence is not None:
            return OFF
        return PROMPT_LOGPROBS if request.params.prompt_logprobs is not None else None

    def _promised(self, request: Request) -> int:
        """Count the tokens of a request that a running one will soon leave for reuse."""
        if self._reason_to_skip(request) is not None:
            return 0
        limit = request.num_reusable
        return max(cache.longest_promise(request.keys(limit), limit) for cache in self.caches)

    def _has_room(self, request: Request, share: int, match: PrefixMatch) -> bool:
        """Tell whether a request's pages are free, or would be if what is kept for reuse gave way."""
        pool = self.pools[share]
        needed = _pages_to_run(request) - len(match.pages)
        if pool.num_free >= needed:
            return True
        return pool.num_free + self.caches[share].num_evictable_beside(match) >= needed

    def _free(self, share: int, count: int) -> bool:
        """Make sure that some pages are free; what is kept for reuse gives way."""
        pool = self.pools[share]
        if pool.num_free < count:
            self.caches[share].evict(count - pool.num_free)
        return pool.num_free >= count

    def _place(self, request: Request, share: int, match: PrefixMatch) -> None:
        cache, first = self.caches[share], share * self.slots_each
        reason = self._reason_to_skip(request)
        if reason is None:
            cache.use(match)
        elif request.sequence is None:
            cache.count_miss(reason)
        needed = _pages_to_run(request) - len(match.pages)
        has_room = self._free(share, needed)
        assert has_room
        slot = min(slot for slot in range(first, first + self.slots_each) if slot not in self.running)
        request.slot, request.pages = slot, [*match.pages, *self.pools[share].take(needed)]
        self.running[slot] = request
        self.page_table[slot, : len(request.pages)] = request.pages
        self.has_changed = True
        self._start(request, match)
        if self.has_cache and request.phase is Phase.PREFILLING:
            request.cuts = self._cuts(request, match)
            request.promised = [request.keys(cut)[-1] for cut in request.cuts]
            for key in request.promised:
                cache.promise(key)

    def _start(self, request: Request, match: PrefixMatch) -> None:
        """Note from where a request runs on."""
        request.num_saved = match.length
        if request.sequence is not None:
            request.phase, request.rows_to_run = Phase.DECODING, request.known_ids()[:-1]
            request.num_reused = request.num_computed = request.num_known - 1
            request.restored = None
            return
        request.phase, request.rows_to_run = Phase.PREFILLING, request.ids_to_run()
        request.num_reused = request.num_computed = match.length
        request.restored = match.snapshot
        if not request.num_preemptions:
            request.num_cached = match.length

    def _cuts(self, request: Request, match: PrefixMatch) -> list[int]:
        """Choose the boundaries whose window states are worth keeping.

        The last one of the prompt serves whoever continues it, the last one that others had in common with
        it serves their like.
        """
        last = request.num_reusable
        ends = {last // PAGE_TOKENS * PAGE_TOKENS, match.num_matched * PAGE_TOKENS}
        return sorted(end for end in ends if request.num_computed < end <= last)


def _pages_to_run(request: Request) -> int:
    """Count the pages of what a request has to run, and of its next token."""
    most = len(request.prompt) + request.params.max_tokens
    return num_pages(min(request.num_known + 1, most))
