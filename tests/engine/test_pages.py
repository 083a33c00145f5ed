"""Pages of one share: who owns them, which are free, which of the kept ones go first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine.pages import PagePool, PagesExhausted, PageTree


def key(name: str) -> bytes:
    return name.encode()


def add_path(tree: PageTree, pool: PagePool, names: str) -> list[int]:
    """Add one page for each prefix of a word; the caller still owns them."""
    pages = pool.take(len(names))
    tree.add([key(names[: count + 1]) for count in range(len(names))], pages)
    return pages


def names_of(nodes) -> list[str]:
    return [node.key.decode() for node in nodes]


def test_the_lowest_free_pages_are_taken_first() -> None:
    pool = PagePool(first=10, count=5)
    assert pool.take(3) == [10, 11, 12]
    pool.release([11])
    assert pool.take(2) == [11, 13]
    assert (pool.num_pages, pool.num_free) == (5, 1)


def test_nothing_is_taken_when_too_few_pages_are_free() -> None:
    pool = PagePool(first=0, count=3)
    pool.take(2)
    with pytest.raises(PagesExhausted, match="pages: got a demand for 2, expected at most the 1 free ones"):
        pool.take(2)
    assert pool.num_free == 1
    assert pool.take(1) == [2]


def test_a_page_is_free_only_without_any_owner() -> None:
    pool = PagePool(first=4, count=2)
    pages = pool.take(1)
    pool.hold(pages)
    pool.release(pages)
    assert (pool.owners(4), pool.num_free) == (1, 1)
    pool.release(pages)
    assert (pool.owners(4), pool.num_free) == (0, 2)


def test_mistakes_with_owners_are_caught() -> None:
    pool = PagePool(first=4, count=2)
    with pytest.raises(AssertionError, match="page 4 is released more often"):
        pool.release([4])
    with pytest.raises(AssertionError, match="page 5 is held but nobody owns it"):
        pool.hold([5])
    for page in (3, 6):
        with pytest.raises(AssertionError, match=f"page {page} is not of this share"):
            pool.owners(page)


def test_the_watcher_hears_when_a_page_becomes_shared_and_when_it_ends() -> None:
    pool, heard = PagePool(first=0, count=1), []
    pool.watch(lambda page, is_shared: heard.append((page, is_shared)))
    pages = pool.take(1)
    for change in (pool.hold, pool.hold, pool.release, pool.release, pool.release):
        change(pages)
    assert heard == [(0, True), (0, False)]
    with pytest.raises(AssertionError, match="watched already"):
        pool.watch(print)


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 5))))
def test_owners_are_what_was_held_less_what_was_released(calls: list[tuple[str, int]]) -> None:
    pool, owners = PagePool(first=2, count=6), dict.fromkeys(range(2, 8), 0)
    for name, number in calls:
        free = sorted(page for page, count in owners.items() if not count)
        if name == "take" and number <= len(free):
            assert pool.take(number) == free[:number]
            owners.update(dict.fromkeys(free[:number], 1))
        elif name == "take":
            with pytest.raises(PagesExhausted):
                pool.take(number)
        elif owners[number + 2]:
            (pool.hold if name == "hold" else pool.release)([number + 2])
            owners[number + 2] += 1 if name == "hold" else -1
        assert [pool.owners(page) for page in owners] == list(owners.values())
        assert pool.num_free == sum(not count for count in owners.values())


def test_pages_of_a_tree_go_from_the_end_and_by_their_last_use() -> None:
    pool = PagePool(first=0, count=8)
    tree = PageTree(pool)
    for names in ("abc", "abd", "x"):
        pool.release(add_path(tree, pool, names))
    assert (tree.num_evictable, pool.num_free) == (5, 3)
    node = tree.find(key("abc"))
    assert node is not None
    tree.touch(node)
    assert names_of(tree.evict(2)) == ["abd", "x"]
    assert names_of(tree.evict(9)) == ["abc", "ab", "a"]
    assert (tree.num_evictable, pool.num_free) == (0, 8)


def test_a_page_is_as_recent_as_the_last_use_below_it() -> None:
    pool = PagePool(first=0, count=4)
    tree = PageTree(pool)
    pool.release(add_path(tree, pool, "a"))
    running = add_path(tree, pool, "x")
    node = tree.find(key("a"))
    assert node is not None
    tree.add([key("a"), key("ab")], [node.page, *(pages := pool.take(1))])
    pool.release(pages)
    assert names_of(tree.evict(1)) == ["ab"]
    pool.release(running)
    # Only "ab" was stored after "x", but "a" was used with it.
    assert names_of(tree.evict(2)) == ["x", "a"]


def test_no_page_goes_before_one_below_it_that_a_request_owns() -> None:
    pool = PagePool(first=0, count=8)
    tree = PageTree(pool)
    first = add_path(tree, pool, "ab")
    # A second request computed "a" again: the tree keeps the first copy, and takes "ac" below it.
    second = pool.take(2)
    assert tree.add([key("a"), key("ac")], second) == 1
    pool.release(first)
    assert tree.num_evictable == 1
    assert names_of(tree.evict(9)) == ["ab"]
    assert pool.owners(first[0]) == 1
    pool.release(second)
    assert tree.num_evictable == 2
    assert names_of(tree.evict(9)) == ["ac", "a"]
    assert pool.num_free == 8


def test_many_uses_leave_no_more_notes_than_pages() -> None:
    pool = PagePool(first=0, count=4)
    tree = PageTree(pool)
    for names in ("ab", "x"):
        pool.release(add_path(tree, pool, names))
    node = tree.find(key("ab"))
    assert node is not None
    for _ in range(1000):
        tree.touch(node)
    assert len(tree._leaves) < 100
    assert names_of(tree.evict(9)) == ["x", "ab", "a"]


def test_a_cleared_tree_leaves_the_pages_of_requests_alone() -> None:
    pool = PagePool(first=0, count=4)
    tree = PageTree(pool)
    pages = add_path(tree, pool, "ab")
    pool.release(pages[1:])
    tree.clear()
    assert (tree.num_evictable, pool.num_free, pool.owners(pages[0])) == (0, 3, 1)
    assert tree.find(key("a")) is None
    pool.release(pages[:1])
    assert (tree.evict(9), pool.num_free) == ([], 4)
