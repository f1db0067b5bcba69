"""Pages of the KV cache."""

import numpy as np
import pytest

from qerl.rollout.scheduler import Pages


def test_a_page_is_available_again_when_its_last_holder_gives_it_back():
    pages = Pages(5, 64)
    held = pages.take(4)
    assert 0 not in held
    assert len(set(held)) == 4
    shared = pages.share(held[:2])
    pages.give_back(held)
    assert pages.available == 2
    pages.give_back(shared)
    assert pages.available == 4


def test_the_pages_of_a_number_of_tokens():
    pages = Pages(2, 64)
    assert [pages.needed(tokens) for tokens in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]


def test_what_nobody_holds_is_neither_shared_nor_given_back():
    pages = Pages(4, 64)
    held = pages.take(1)
    pages.give_back(held)
    with pytest.raises(RuntimeError, match="has no holder"):
        pages.give_back(held)
    with pytest.raises(RuntimeError, match="has no holder"):
        pages.share(held)
    with pytest.raises(RuntimeError, match="4 pages of the KV cache are requested, but only 3 are free"):
        pages.take(4)


def test_random_traffic_leaks_nothing_and_hands_no_page_out_twice():
    numbers, pages = np.random.default_rng(0), Pages(200, 64)
    holders: list[list[int]] = []
    for _ in range(3000):
        choice = numbers.integers(3)
        if choice == 0 and pages.available:
            taken = pages.take(int(numbers.integers(1, pages.available + 1)))
            assert not set(taken) & {page for holder in holders for page in holder}
            holders.append(taken)
        elif choice == 1 and holders:
            holders.append(pages.share(holders[int(numbers.integers(len(holders)))]))
        elif holders:
            pages.give_back(holders.pop(int(numbers.integers(len(holders)))))
        assert pages.available == 199 - len({page for holder in holders for page in holder})
    for holder in holders:
        pages.give_back(holder)
    assert sorted(pages.take(199)) == list(range(1, 200))
