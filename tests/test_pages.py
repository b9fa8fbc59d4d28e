"""The pool of chunks."""

from dataclasses import replace

import numpy as np
import pytest

from cbfn import pages
from cbfn.types import InvariantViolation


def chunks(*numbers):
    return np.array(numbers, np.int32)


def test_new_pool_has_all_but_the_null_chunks_free():
    pool = pages.init(6)
    assert (pool.num_usable, pool.num_free, pool.num_cached, pool.num_owned) == (4, 4, 0, 0)
    assert sorted(pool.free) == [2, 3, 4, 5]
    pages.check(pool)


def test_allocation_serves_all_counts_or_none():
    pool = pages.init(6)
    assert pages.allocate(pool, [3, 2]) is None
    after, (first, none, second) = pages.allocate(pool, [3, 0, 1])
    assert (len(first), len(none), len(second)) == (3, 0, 1)
    assert len({*first, *second}) == 4
    assert (pool.num_free, after.num_free, after.num_owned) == (4, 0, 4)


def test_same_calls_give_the_same_chunks():
    pool = pages.init(9)
    one, other = (pages.allocate(pool, [2, 3])[1] for _ in range(2))
    assert [part.tolist() for part in one] == [part.tolist() for part in other]


def test_shared_chunk_is_free_once_its_last_owner_let_go():
    pool, (mine,) = pages.allocate(pages.init(4), [1])
    pool = pages.share(pool, mine)
    assert pool.owners[mine] == [2]
    pool, cached = pages.release(pool, mine)
    assert (pool.num_owned, len(cached)) == (1, 0)
    pool, cached = pages.release(pool, mine)
    assert (pool.num_owned, pool.num_free, len(cached)) == (0, 2, 0)


def test_published_chunk_is_cached_when_it_is_released_and_wakes_up_when_it_is_shared():
    pool, (mine,) = pages.allocate(pages.init(5), [2])
    pool, cached = pages.release(pages.publish(pool, mine[:1]), mine)
    assert cached.tolist() == mine[:1].tolist()
    assert (pool.num_free, pool.num_cached, pool.num_available) == (2, 1, 3)
    awake = pages.share(pool, cached)
    assert (awake.num_cached, awake.num_owned) == (0, 1)
    gone = pages.evict(pool, cached)
    assert (gone.num_cached, gone.num_free) == (0, 3)
    assert not gone.published.any()


def test_chunk_stands_in_a_release_once_for_each_owner_that_lets_go():
    pool, (mine,) = pages.allocate(pages.init(5), [2])
    pool = pages.publish(pages.share(pool, mine), mine)
    twice = np.concatenate([mine[::-1], mine])
    pool, cached = pages.release(pool, twice)
    assert pool.num_owned == 0
    assert cached.tolist() == mine[::-1].tolist()  # in the order they were given, once each
    pages.check(pool)


@pytest.mark.parametrize("wrong", [0, 1, 5, 6, -1])
def test_what_is_not_owned_is_not_released(wrong):
    pool, (mine,) = pages.allocate(pages.init(6), [2])
    with pytest.raises(InvariantViolation, match="pages:"):
        pages.release(pool, np.append(mine, np.int32(wrong)))
    with pytest.raises(InvariantViolation, match="only owned chunks are released"):
        pages.release(pool, np.append(mine, mine))
    assert pool.num_owned == 2


@pytest.mark.parametrize("wrong", [0, 1, 5, 6, -1])
def test_what_is_neither_owned_nor_cached_is_not_shared(wrong):
    pool, (mine,) = pages.allocate(pages.init(6), [1])
    with pytest.raises(InvariantViolation, match="pages:"):
        pages.share(pool, chunks(mine[0], wrong))
    with pytest.raises(InvariantViolation, match="twice"):
        pages.share(pool, np.append(mine, mine))


def test_only_owned_chunks_are_published_and_only_cached_ones_evicted():
    pool, (mine,) = pages.allocate(pages.init(6), [1])
    with pytest.raises(InvariantViolation, match="only owned chunks are published"):
        pages.publish(pool, chunks(5))
    for wrong in (mine, chunks(5)):
        with pytest.raises(InvariantViolation, match="only cached chunks are evicted"):
            pages.evict(pages.publish(pool, mine), wrong)


def test_arrays_of_a_pool_are_read_only():
    pool, (mine,) = pages.allocate(pages.init(6), [2])
    pool, _ = pages.release(pages.publish(pool, mine[:1]), mine)
    for array in (pool.owners, pool.published, pool.free):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ({"owners": [0, 0, 1, -1, 0]}, "negative"),
        ({"owners": [1, 0, 0, 0, 0]}, "null chunk"),
        ({"owners": [0, 1, 0, 0, 0]}, "null chunk"),
        ({"owners": [0, 0, 1, 0, 0]}, "free stack"),
        ({"published": [0, 1, 0, 0, 0]}, "null chunk"),
        ({"published": [0, 0, 1, 0, 0]}, "1 chunks are cached, and num_cached is 0"),
        ({"free": [2, 3, 3]}, "free stack"),
        ({"free": [2, 3]}, "free stack"),
        ({"num_cached": 1}, "0 chunks are cached, and num_cached is 1"),
    ],
)
def test_check_finds_a_pool_whose_parts_disagree(broken, found):
    pool = pages.init(5)
    pages.check(pool)
    types = {"owners": np.int32, "published": bool, "free": np.int32}
    values = {
        name: np.array(value, types[name]) if name in types else value
        for name, value in broken.items()
    }
    with pytest.raises(InvariantViolation, match=f"pages: .*{found}"):
        pages.check(replace(pool, **values))
