"""The pages of one share: how many owners each has, and the tree of those that are kept by their content.

Separate because requests and the prefix cache own the same pages, and neither may free the other's.
Read next: `prefix.py`, which keeps pages for requests to come.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_SPARE_ENTRIES = 64

type Watcher = Callable[[int, bool], object]
"""Called with (page, whether it has several owners now)."""


class PagesExhausted(RuntimeError):
    """More pages were asked for than are free; none was taken."""


class PagePool:
    """Pages of one share; a page is free when nobody owns it.

    Args:
        first: id of the first page.
        count: number of pages, 0 or more; their ids are consecutive.
    """

    def __init__(self, first: int, count: int) -> None:
        assert first >= 0 and count >= 0
        self._first = first
        self._owners = [0] * count
        # Ascending numbers are a heap already.
        self._free = list(range(first, first + count))
        self._watcher: Watcher | None = None

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def owners(self, page: int) -> int:
        """Count the owners of a page, 0 for a free one."""
        return self._owners[self._index(page)]

    def take(self, count: int) -> list[int]:
        """Take the lowest-numbered free pages; each has one owner then.

        Args:
            count: how many, 0 or more.

        Returns:
            Their ids, ascending.

        Raises:
            PagesExhausted: fewer are free; then none is taken.
        """
        assert count >= 0
        if count > len(self._free):
            raise PagesExhausted(
                f"pages: got a demand for {count}, expected at most the {len(self._free)} free ones of "
                f"{self.num_pages}; evict cached pages or release a request's first"
            )
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._owners[page - self._first] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add one owner to each page.

        Args:
            pages: ids of pages that are owned already.
        """
        for page in pages:
            index = self._index(page)
            assert self._owners[index] > 0, f"page {page} is held but nobody owns it"
            self._owners[index] += 1
            if self._owners[index] == 2:
                self._tell(page, True)

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each page; a page without an owner is free again.

        Args:
            pages: ids of pages that are owned.
        """
        for page in pages:
            index = self._index(page)
            assert self._owners[index] > 0, f"page {page} is released more often than it was held"
            self._owners[index] -= 1
            if self._owners[index] == 0:
                heapq.heappush(self._free, page)
            elif self._owners[index] == 1:
                self._tell(page, False)

    def watch(self, watcher: Watcher) -> None:
        """Have one function told whenever a page changes between one owner and several.

        Args:
            watcher: called after the change; it must not change owners itself.
        """
        assert self._watcher is None, "the pool is watched already"
        self._watcher = watcher

    def _tell(self, page: int, is_shared: bool) -> None:
        if self._watcher is not None:
            self._watcher(page, is_shared)

    def _index(self, page: int) -> int:
        index = page - self._first
        assert 0 <= index < len(self._owners), f"page {page} is not of this share"
        return index


@dataclass(slots=True, eq=False)
class PageNode:
    """One page of a tree.

    Attributes:
        key: names the page's content and all before it.
        page: its id.
        parent: the page before it, None for a first page.
        num_children: pages that follow it in some sequence.
        num_busy: 1 if others own the page as well, plus 1 for each child for which it is not 0.
        last_used: tick of the latest use that ended here or in an evicted page below. Uses that ended in a
            page still below are noted there alone: this one cannot go before that one.
        snapshot: index of the window state that is stored for the end of this page, None for none.
        has_decoder: whether that state has the decoder half's windows, too.
    """

    key: bytes
    page: int
    parent: PageNode | None
    num_children: int = 0
    num_busy: int = 0
    last_used: int = 0
    snapshot: int | None = None
    has_decoder: bool = False


class PageTree:
    """Pages kept by their content; what is here has all pages before it here. The tree owns each once.

    A page may go when nobody else owns it or any page below it; those without pages below go first.

    Args:
        pool: the pages of the share; the tree watches it.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._nodes: dict[bytes, PageNode] = {}
        self._node_of_page: dict[int, PageNode] = {}
        # Leaves that may go, by last use; entries that are out of date are skipped when they come up.
        self._leaves: list[tuple[int, bytes]] = []
        self._num_evictable = 0
        self._clock = 0
        pool.watch(self._on_sharing)

    @property
    def num_evictable(self) -> int:
        """Pages that may go, kept up to date with every change of owners."""
        return self._num_evictable

    def find(self, key: bytes) -> PageNode | None:
        """Find a page by its key."""
        return self._nodes.get(key)

    def at(self, page: int) -> PageNode:
        """Find a page of the tree by its id."""
        return self._node_of_page[page]

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Add a sequence's first pages and note the use; what is here already keeps its page.

        Args:
            keys: of the pages, from the first on, at least one.
            pages: at least as many, owned by the caller.

        Returns:
            Number of pages that are new.
        """
        # Whatever is here has its prefix here, so only the end can be missing.
        num_here = len(keys)
        while num_here and keys[num_here - 1] not in self._nodes:
            num_here -= 1
        last = self._nodes[keys[num_here - 1]] if num_here else None
        for number in range(num_here, len(keys)):
            last = self._add_below(last, keys[number], pages[number])
        assert last is not None
        self.touch(last)
        return len(keys) - num_here

    def touch(self, node: PageNode) -> None:
        """Note a use of a page and of all before it."""
        self._clock += 1
        node.last_used = self._clock
        self._offer(node)

    def evict(self, count: int) -> list[PageNode]:
        """Take out pages that may go, least recently used first, and give up their ownership.

        Args:
            count: pages at most.

        Returns:
            What was taken out.
        """
        removed = []
        while len(removed) < count and self._leaves:
            last_used, key = heapq.heappop(self._leaves)
            node = self._nodes.get(key)
            if node is not None and node.last_used == last_used and self._is_free_leaf(node):
                self._remove(node)
                removed.append(node)
        return removed

    def clear(self) -> None:
        """Take out every page, whoever else owns it."""
        pages = list(self._node_of_page)
        for kept in (self._nodes, self._node_of_page, self._leaves):
            kept.clear()
        self._num_evictable = 0
        self._pool.release(pages)

    def _add_below(self, parent: PageNode | None, key: bytes, page: int) -> PageNode:
        assert page not in self._node_of_page, f"page {page} is here under another key"
        self._pool.hold([page])
        node = PageNode(key, page, parent)
        self._nodes[key] = self._node_of_page[page] = node
        if parent is not None:
            parent.num_children += 1
        self._num_evictable += 1
        # Whoever adds a page owns it as well.
        self._on_sharing(page, True)
        return node

    def _remove(self, node: PageNode) -> None:
        del self._nodes[node.key], self._node_of_page[node.page]
        self._num_evictable -= 1
        self._pool.release([node.page])
        if node.parent is not None:
            node.parent.num_children -= 1
            node.parent.last_used = max(node.parent.last_used, node.last_used)
            self._offer(node.parent)

    def _on_sharing(self, page: int, is_shared: bool) -> None:
        """Note that a page got a second owner or lost it, and tell those above as long as it matters."""
        node = self._node_of_page.get(page)
        change = 1 if is_shared else -1
        while node is not None:
            node.num_busy += change
            if node.num_busy != int(is_shared):
                break
            self._num_evictable -= change
            self._offer(node)
            node = node.parent

    def _offer(self, node: PageNode) -> None:
        if not self._is_free_leaf(node):
            return
        heapq.heappush(self._leaves, (node.last_used, node.key))
        if len(self._leaves) > 2 * len(self._nodes) + _SPARE_ENTRIES:
            free = filter(self._is_free_leaf, self._nodes.values())
            self._leaves = [(leaf.last_used, leaf.key) for leaf in free]
            heapq.heapify(self._leaves)

    @staticmethod
    def _is_free_leaf(node: PageNode) -> bool:
        return not node.num_children and not node.num_busy
