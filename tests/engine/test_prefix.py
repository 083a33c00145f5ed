"""The prefix cache of one share: what is found, why not, what gives way; then any order of calls.

Read next: `test_pages.py`, the pages below it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_jax.config import PAGE_TOKENS
from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.prefix import (
    EVICTED,
    NEW,
    NO_SNAPSHOT,
    OFF,
    PROMPT_LOGPROBS,
    REMEMBERED_EVICTIONS,
    SHORT,
    PrefixCache,
    PrefixCounters,
    PrefixMatch,
    page_keys,
)

FIRST_PAGE, FIRST_SNAPSHOT = 100, 7


def tokens_of(word: str, rest: int = 0) -> list[int]:
    """A prompt with one page for each letter, each page of one token, and some tokens after them."""
    return [ord(letter) for letter in word for _ in range(PAGE_TOKENS)] + [0] * rest


def keys_of(word: str) -> list[bytes]:
    return page_keys(tokens_of(word))


def make_cache(num_pages: int = 16, num_snapshots: int = 4) -> tuple[PrefixCache, PagePool]:
    pool = PagePool(FIRST_PAGE, num_pages)
    return PrefixCache(pool, FIRST_SNAPSHOT, num_snapshots), pool


def run_once(cache: PrefixCache, pool: PagePool, word: str, has_decoder: bool = True) -> list[int]:
    """A request that runs without a hit, and stores its pages and its state at the end."""
    pages = pool.take(len(word))
    cache.store(keys_of(word), pages)
    cache.save_snapshot(keys_of(word), has_decoder)
    pool.release(pages)
    return pages


def match_word(cache: PrefixCache, word: str, rest: int = 1, decoder_start: int | None = None) -> PrefixMatch:
    token_ids = tokens_of(word, rest)
    return cache.match(page_keys(token_ids), len(token_ids) - 1, decoder_start)


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 0), (127, 0), (128, 1), (129, 1), (384, 3)])
def test_each_complete_page_has_a_key(length: int, count: int) -> None:
    assert len(page_keys(list(range(length)))) == count


def test_keys_are_the_documented_hashes() -> None:
    token_ids = [1, 2**31 - 1, 300] + [5] * 253
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    first = hashlib.blake2b(b"root" + data[:512], digest_size=16).digest()
    second = hashlib.blake2b(first + data[512:], digest_size=16).digest()
    assert page_keys(token_ids, root=b"root") == [first, second]
    assert page_keys(np.array(token_ids, np.int64), root=b"root") == [first, second]


def test_known_keys_are_extended_and_not_computed_again() -> None:
    token_ids = tokens_of("abcd", rest=5)
    keys = page_keys(token_ids)
    for count in range(5):
        assert page_keys(token_ids, keys[:count]) == keys
    # Had it looked at the first page again, its change would show.
    assert page_keys([7] * PAGE_TOKENS + token_ids[PAGE_TOKENS:], keys[:1]) == keys
    assert page_keys(token_ids, [b"else"])[1:] != keys[1:]


def test_a_key_depends_on_every_token_before_and_on_the_root() -> None:
    token_ids = tokens_of("abc")
    changed = [token_ids[0] + 1, *token_ids[1:]]
    pairs = zip(page_keys(token_ids), page_keys(changed), page_keys(token_ids, root=b"image"), strict=True)
    assert all(len(set(keys)) == 3 for keys in pairs)
    assert page_keys(tokens_of("abx"))[:2] == page_keys(token_ids)[:2]


def test_a_prompt_that_was_run_is_found_with_its_pages_and_state() -> None:
    cache, pool = make_cache()
    pages = run_once(cache, pool, "abc")
    assert match_word(cache, "abcd") == PrefixMatch(384, tuple(pages), FIRST_SNAPSHOT, None, 3)
    cache.use(match_word(cache, "abcd"))
    assert [pool.owners(page) for page in pages] == [2, 2, 2]
    assert (cache.counters.hits, cache.counters.hit_tokens, cache.counters.misses) == (1, 384, {})


@pytest.mark.parametrize("length", [384, 385, 400, 511, 512])
def test_bc12_a_complete_hit_leaves_a_token(length: int) -> None:
    cache, pool = make_cache()
    token_ids = tokens_of("abcd")[:length]
    keys = page_keys(token_ids)
    pages = pool.take(len(keys))
    for count in range(1, len(keys) + 1):
        cache.store(keys[:count], pages)
        cache.save_snapshot(keys[:count], True)
    found = cache.match(keys, length - 1)
    assert found.length == found.num_matched * PAGE_TOKENS == (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert length - found.length >= 1
    assert found.pages == tuple(pages[: found.num_matched])


def test_the_longest_prefix_with_a_state_is_taken_and_the_rest_of_the_pages_told() -> None:
    cache, pool = make_cache()
    pages = pool.take(4)
    cache.store(keys_of("abcd"), pages)
    for word in ("a", "ab"):
        cache.save_snapshot(keys_of(word), True)
    found = match_word(cache, "abcx")
    assert (found.length, found.pages, found.snapshot) == (256, tuple(pages[:2]), FIRST_SNAPSHOT + 1)
    assert found.num_matched == 3


def test_asking_changes_nothing() -> None:
    cache, pool = make_cache(num_pages=2)
    run_once(cache, pool, "a")
    run_once(cache, pool, "b")
    for _ in range(3):
        match_word(cache, "a")
    assert cache.counters == PrefixCounters(stored_pages=2, stored_snapshots=2)
    cache.evict(1)
    assert match_word(cache, "a").reason == EVICTED


def test_each_miss_says_why() -> None:
    cache, pool = make_cache(num_pages=4)
    run_once(cache, pool, "ab")
    assert match_word(cache, "", rest=100).reason == SHORT
    assert match_word(cache, "a", rest=0).reason == SHORT
    assert match_word(cache, "x").reason == NEW
    # The state lies at the end of "b", which is beyond these.
    assert match_word(cache, "ac") == PrefixMatch(0, (), None, NO_SNAPSHOT, 1)
    assert match_word(cache, "ab", rest=0) == PrefixMatch(0, (), None, NO_SNAPSHOT, 1)
    for word in ("", "x", "ac", "ac"):
        cache.use(match_word(cache, word))
    assert cache.evict(2) == 2
    assert match_word(cache, "ab").reason == EVICTED
    cache.use(match_word(cache, "ab"))
    for reason in (PROMPT_LOGPROBS, OFF, OFF):
        cache.count_miss(reason)
    expected = {SHORT: 1, NEW: 1, NO_SNAPSHOT: 2, EVICTED: 1, PROMPT_LOGPROBS: 1, OFF: 2}
    assert cache.counters.misses == expected
    with pytest.raises(AssertionError, match="unlucky"):
        cache.count_miss("unlucky")


def test_old_evictions_are_forgotten() -> None:
    cache, pool = make_cache(num_pages=1)
    for number in range(REMEMBERED_EVICTIONS + 1):
        pages = pool.take(1)
        cache.store([number.to_bytes(4)], pages)
        pool.release(pages)
        cache.evict(1)
    reasons = [cache.match([number.to_bytes(4)], 128).reason for number in (0, 1, REMEMBERED_EVICTIONS)]
    assert reasons == [NEW, EVICTED, EVICTED]


def test_an_eviction_that_is_repeated_is_remembered_from_then_on() -> None:
    cache, pool = make_cache(num_pages=1)
    for number in [0, 1, 0, *range(2, REMEMBERED_EVICTIONS + 1)]:
        pages = pool.take(1)
        cache.store([number.to_bytes(4)], pages)
        pool.release(pages)
        cache.evict(1)
    assert [cache.match([number.to_bytes(4)], 128).reason for number in (0, 1)] == [EVICTED, NEW]


def test_a_page_that_came_back_is_no_longer_evicted() -> None:
    cache, pool = make_cache()
    for _ in range(2):
        run_once(cache, pool, "a")
        assert match_word(cache, "a").length == 128
        cache.evict(1)
        assert match_word(cache, "a").reason == EVICTED


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize(("decoder_start", "is_bounded_hit"), [(255, False), (256, True), (300, True)])
def test_a_bounded_prefill_needs_no_decoder_windows_but_a_state_before_its_decoder_rows(
    has_decoder: bool, decoder_start: int, is_bounded_hit: bool
) -> None:
    cache, pool = make_cache()
    run_once(cache, pool, "ab", has_decoder)
    assert match_word(cache, "abcd").length == (256 if has_decoder else 0)
    assert match_word(cache, "abcd", decoder_start=decoder_start).length == (256 if is_bounded_hit else 0)


def test_a_bounded_prefill_takes_a_shorter_state_where_the_longest_is_too_long() -> None:
    cache, pool = make_cache()
    run_once(cache, pool, "a", has_decoder=False)
    run_once(cache, pool, "abc")
    assert match_word(cache, "abcd", decoder_start=200).length == 128
    assert match_word(cache, "abcd").length == 384


def test_pages_that_are_here_already_are_kept() -> None:
    cache, pool = make_cache()
    first, second = run_once(cache, pool, "ab"), pool.take(3)
    cache.store(keys_of("abc"), second)
    cache.save_snapshot(keys_of("abc"), True)
    assert match_word(cache, "abc").pages == (*first, second[2])
    assert [pool.owners(page) for page in second] == [1, 1, 2]
    assert cache.counters.stored_pages == 3


def test_storing_nothing_and_storing_with_a_page_that_is_not_full_yet() -> None:
    cache, pool = make_cache()
    pages = pool.take(3)
    cache.store([], pages)
    assert cache.counters.stored_pages == 0
    cache.store(keys_of("ab"), pages)
    assert (cache.counters.stored_pages, pool.owners(pages[2])) == (2, 1)


def test_a_state_is_saved_once_and_upgraded_in_place() -> None:
    cache, pool = make_cache()
    cache.store(keys_of("a"), pool.take(1))
    saved = [cache.save_snapshot(keys_of("a"), has_decoder) for has_decoder in (False, False, True, True)]
    assert saved == [FIRST_SNAPSHOT, None, FIRST_SNAPSHOT, None]
    assert cache.save_snapshot(keys_of("a"), False) is None
    assert match_word(cache, "a").length == 128
    assert (cache.counters.stored_snapshots, cache.counters.evicted_snapshots) == (1, 0)


def test_no_state_is_saved_without_its_page_or_without_room_for_any() -> None:
    cache, pool = make_cache()
    assert cache.save_snapshot(keys_of("a"), True) is None
    run_once(cache, pool, "a")
    cache.evict(1)
    assert cache.save_snapshot(keys_of("a"), True) is None
    cache, pool = make_cache(num_snapshots=0)
    run_once(cache, pool, "a")
    assert match_word(cache, "a") == PrefixMatch(0, (), None, NO_SNAPSHOT, 1)
    assert cache.counters.stored_snapshots == 0


def test_the_state_that_was_used_longest_ago_gives_way() -> None:
    cache, pool = make_cache(num_snapshots=2)
    for word in "ab":
        run_once(cache, pool, word)
    cache.use(match_word(cache, "a"))
    run_once(cache, pool, "c")
    assert [match_word(cache, word).snapshot for word in "abc"] == [7, None, 8]
    assert match_word(cache, "b").reason == NO_SNAPSHOT
    assert (cache.counters.stored_snapshots, cache.counters.evicted_snapshots) == (3, 1)


def test_a_state_that_is_upgraded_is_as_recent_as_a_new_one() -> None:
    cache, pool = make_cache(num_snapshots=2)
    for word, has_decoder in (("a", False), ("b", True), ("a", True), ("c", True)):
        run_once(cache, pool, word, has_decoder)
    assert [match_word(cache, word).length for word in "abc"] == [128, 0, 128]


def test_a_page_that_goes_takes_its_state_with_it() -> None:
    cache, pool = make_cache(num_snapshots=1)
    run_once(cache, pool, "a")
    cache.evict(1)
    assert cache.counters.evicted_snapshots == 1
    run_once(cache, pool, "b")
    assert match_word(cache, "b").snapshot == FIRST_SNAPSHOT
    assert cache.counters.evicted_snapshots == 1


def test_a_used_prefix_stays_and_the_others_go() -> None:
    cache, pool = make_cache()
    for word in ("ab", "xy"):
        run_once(cache, pool, word)
    found = match_word(cache, "ab")
    cache.use(found)
    pool.release(found.pages)
    assert cache.evict(2) == 2
    assert [match_word(cache, word).length for word in ("ab", "xy")] == [256, 0]


def test_pages_of_running_requests_are_never_evicted() -> None:
    cache, pool = make_cache(num_pages=4)
    run_once(cache, pool, "ab")
    run_once(cache, pool, "xy")
    found = match_word(cache, "ab")
    cache.use(found)
    assert (cache.num_evictable, cache.evict(9), pool.num_free) == (2, 2, 2)
    pool.release(found.pages)
    assert (cache.num_evictable, cache.evict(9), pool.num_free) == (2, 2, 4)
    assert (cache.counters.stored_pages, cache.counters.evicted_pages) == (4, 4)


def test_what_is_left_to_evict_beside_a_match_is_known_before_it_is_used() -> None:
    cache, pool = make_cache()
    for word in ("abc", "abd", "x"):
        run_once(cache, pool, word)
    other = match_word(cache, "abd")
    cache.use(other)
    found = match_word(cache, "abc")
    expected = cache.num_evictable_beside(found)
    cache.use(found)
    assert cache.num_evictable == expected == 1
    assert cache.num_evictable_beside(match_word(cache, "z")) == 1


def test_a_match_that_is_out_of_date_is_refused() -> None:
    cache, pool = make_cache(num_snapshots=1)
    run_once(cache, pool, "a")
    found = match_word(cache, "a")
    run_once(cache, pool, "b")
    with pytest.raises(AssertionError, match="the match is out of date"):
        cache.use(found)


def test_dropping_forgets_everything_but_what_requests_own() -> None:
    cache, pool = make_cache()
    run_once(cache, pool, "y")
    cache.evict(1)
    run_once(cache, pool, "ab")
    run_once(cache, pool, "x")
    found = match_word(cache, "ab")
    cache.use(found)
    cache.promise(keys_of("z")[0])
    cache.drop()
    assert (cache.num_evictable, pool.num_free) == (0, pool.num_pages - 2)
    assert [match_word(cache, word).reason for word in ("ab", "x", "y")] == [NEW, NEW, NEW]
    cache.withdraw(keys_of("z")[0])
    cache.store(keys_of("ab"), found.pages)
    assert cache.save_snapshot(keys_of("ab"), True) == FIRST_SNAPSHOT
    pool.release(found.pages)
    assert match_word(cache, "ab").pages == found.pages
    for word in "pqrs":
        run_once(cache, pool, word)
    assert [match_word(cache, word).length for word in ("ab", "p", "s")] == [0, 128, 128]
    assert (cache.evict(9), pool.num_free) == (6, pool.num_pages)


def test_promises_are_counted_and_the_longest_is_found() -> None:
    cache, _ = make_cache()
    keys = keys_of("abc")
    assert cache.longest_promise(keys, 1000) == 0
    for key in (keys[0], keys[1], keys[1], keys_of("xyz")[2]):
        cache.promise(key)
    assert [cache.longest_promise(keys, limit) for limit in (127, 128, 255, 256, 999)] == [
        0,
        128,
        128,
        256,
        256,
    ]
    cache.withdraw(keys[1])
    assert cache.is_promised(keys[1])
    cache.withdraw(keys[1])
    assert not cache.is_promised(keys[1])
    assert cache.longest_promise(keys, 999) == 128
    with pytest.raises(AssertionError, match="more often than promised"):
        cache.withdraw(keys[1])


def test_counters_of_shares_add_up_and_stay() -> None:
    parts = [
        PrefixCounters(1, 128, {NEW: 2, SHORT: 1}, 3, 4, 5, 6),
        PrefixCounters(10, 256, {NEW: 1, OFF: 7}, 30, 40, 50, 60),
    ]
    total = PrefixCounters.total(parts)
    assert total == PrefixCounters(11, 384, {NEW: 3, SHORT: 1, OFF: 7}, 33, 44, 55, 66)
    parts[0].misses[NEW] = 100
    assert total.misses[NEW] == 3
    assert PrefixCounters.total([]) == PrefixCounters()


NUM_PAGES, NUM_SNAPSHOTS = 9, 3
STARTS = (0, 127, 128, 129, 255, 256, 300, 384, 1000)
words = st.text("ab", max_size=4)


@dataclass
class ModelPage:
    """What the model knows of a page of the tree, named by its word."""

    page: int
    last_used: int = 0
    snapshot: int | None = None
    has_decoder: bool = False


@dataclass
class ModelRequest:
    """A running request: its word, and its pages."""

    word: str
    pages: list[int] = field(default_factory=list)


class PrefixMachine(RuleBasedStateMachine):
    """Requests come, store, leave and make room in any order, beside a model that searches everything."""

    @initialize()
    def start(self) -> None:
        self.cache, self.pool = make_cache(NUM_PAGES, NUM_SNAPSHOTS)
        self.tree: dict[str, ModelPage] = {}
        self.requests: list[ModelRequest] = []
        self.evicted: set[str] = set()
        self.content: dict[int, str] = {}
        self.state_content: dict[int, str] = {}
        self.state_order: list[int] = []
        self.clock = 0
        self.counters = PrefixCounters()

    def touch(self, word: str) -> None:
        self.clock += 1
        for count in range(1, len(word) + 1):
            self.tree[word[:count]].last_used = self.clock

    def held(self) -> set[int]:
        return {page for request in self.requests for page in request.pages}

    def evictable(self) -> list[str]:
        """Words whose page and all pages below are the tree's alone, in the order in which they go."""
        held = self.held()
        alone = [
            word
            for word in self.tree
            if not any(other.startswith(word) and self.tree[other].page in held for other in self.tree)
        ]
        return sorted(alone, key=lambda word: (self.tree[word].last_used, -len(word)))

    def evict(self, count: int) -> None:
        going = self.evictable()[:count]
        assert self.cache.evict(count) == len(going)
        for word in going:
            gone = self.tree.pop(word)
            self.evicted.add(word)
            self.counters.evicted_pages += 1
            if gone.snapshot is not None:
                self.state_order.remove(gone.snapshot)
                self.counters.evicted_snapshots += 1

    def longest(self, word: str, limit: int, decoder_start: int | None) -> tuple[int, int]:
        """Pages of the longest prefix that is usable, and of the longest that is here."""
        usable = here = 0
        for count in range(1, min(len(word), limit // PAGE_TOKENS) + 1):
            found = self.tree.get(word[:count])
            here = count if found is not None else here
            is_bounded_end = decoder_start is not None and count * PAGE_TOKENS <= decoder_start
            is_exact_end = decoder_start is None and found is not None and found.has_decoder
            if found is not None and found.snapshot is not None and (is_bounded_end or is_exact_end):
                usable = count
        return usable, here

    @rule(word=words, rest=st.integers(0, 2), start=st.none() | st.sampled_from(STARTS), data=st.data())
    def admit(self, word: str, rest: int, start: int | None, data: st.DataObject) -> None:
        if self.tree and data.draw(st.booleans()):
            word = data.draw(st.sampled_from(sorted(self.tree)))
        token_ids = tokens_of(word, rest)
        keys, limit = page_keys(token_ids), len(token_ids) - 1
        found = self.cache.match(keys, limit, start)
        usable, here = self.longest(word, limit, start)
        assert (found.length, found.num_matched) == (usable * PAGE_TOKENS, here)
        assert [self.content[page] for page in found.pages] == [
            word[:count] for count in range(1, usable + 1)
        ]
        beside = self.cache.num_evictable_beside(found)
        if len(word) - usable > self.pool.num_free + beside:
            return
        self.cache.use(found)
        assert self.cache.num_evictable == beside
        request = ModelRequest(word, list(found.pages))
        self.requests.append(request)
        if usable:
            assert found.snapshot is not None and found.reason is None
            assert self.state_content[found.snapshot] == word[:usable]
            self.touch(word[:usable])
            self.state_order.remove(found.snapshot)
            self.state_order.append(found.snapshot)
            self.counters.hits += 1
            self.counters.hit_tokens += found.length
        else:
            missing = EVICTED if word[:1] in self.evicted else NEW
            expected = SHORT if limit < PAGE_TOKENS else NO_SNAPSHOT if here else missing
            assert (found.reason, found.snapshot, found.pages) == (expected, None, ())
            self.counters.misses[expected] = self.counters.misses.get(expected, 0) + 1
        self.evict(max(0, len(word) - usable - self.pool.num_free))
        request.pages += self.pool.take(len(word) - usable)
        for count in range(usable, len(word)):
            self.content[request.pages[count]] = word[: count + 1]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_whole=st.booleans())
    def store(self, data: st.DataObject, is_whole: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        length = len(request.word) if is_whole else data.draw(st.integers(0, len(request.word)))
        word = request.word[:length]
        self.cache.store(keys_of(word), request.pages)
        for count in range(1, length + 1):
            if word[:count] not in self.tree:
                self.tree[word[:count]] = ModelPage(request.pages[count - 1])
                self.counters.stored_pages += 1
        self.touch(word)

    @rule(word=words.filter(len), has_decoder=st.booleans(), data=st.data())
    def save(self, word: str, has_decoder: bool, data: st.DataObject) -> None:
        if self.tree and data.draw(st.booleans()):
            word = data.draw(st.sampled_from(sorted(self.tree)))
        saved = self.cache.save_snapshot(keys_of(word), has_decoder)
        found = self.tree.get(word)
        if found is None or found.has_decoder or (found.snapshot is not None and not has_decoder):
            assert saved is None
            return
        assert saved is not None
        if found.snapshot is None:
            self.counters.stored_snapshots += 1
            if len(self.state_order) == NUM_SNAPSHOTS:
                oldest = self.state_order.pop(0)
                loser = next(page for page in self.tree.values() if page.snapshot == oldest)
                loser.snapshot, loser.has_decoder = None, False
                self.counters.evicted_snapshots += 1
            assert saved not in self.state_order
        else:
            assert saved == found.snapshot
            self.state_order.remove(saved)
        found.snapshot, found.has_decoder = saved, has_decoder
        self.state_order.append(saved)
        self.state_content[saved] = word

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pool.release(data.draw(st.permutations(request.pages)))

    @rule(count=st.integers(0, NUM_PAGES))
    def make_room(self, count: int) -> None:
        self.evict(count)

    @rule(chance=st.integers(0, 9))
    def drop(self, chance: int) -> None:
        if chance:
            return
        self.cache.drop()
        self.tree.clear()
        self.evicted.clear()
        self.state_order.clear()

    @invariant()
    def owners_add_up(self) -> None:
        kept = [found.page for found in self.tree.values()]
        assert len(set(kept)) == len(kept)
        owned = kept + [page for request in self.requests for page in request.pages]
        pages = range(FIRST_PAGE, FIRST_PAGE + NUM_PAGES)
        assert [self.pool.owners(page) for page in pages] == [owned.count(page) for page in pages]
        assert self.pool.num_free + len(set(owned)) == NUM_PAGES

    @invariant()
    def no_page_has_two_contents(self) -> None:
        for request in self.requests:
            for count, page in enumerate(request.pages, start=1):
                assert self.content[page] == request.word[:count]
        for word, found in self.tree.items():
            assert self.content[found.page] == word

    @invariant()
    def what_may_go_is_known(self) -> None:
        assert self.cache.num_evictable == len(self.evictable())
        assert self.cache.counters == self.counters


TestAnyOrderOfCalls = PrefixMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
