"""Which replica gets a request."""

from __future__ import annotations

import random

from reinforge.engines.routing import RATIO, SPARE, PrefixRouter


def test_an_episode_stays_where_it_began_and_new_prompts_are_spread() -> None:
    """Twenty turns of eight episodes in four groups, asked in any order."""
    router = PrefixRouter()
    system = list(range(100))  # that all begin with
    loads = dict.fromkeys(range(2), 0)
    episodes = {(g, e): [*system, 500 + g] for g in range(4) for e in range(2)}
    homes: dict[tuple[int, int], set[int]] = {name: set() for name in episodes}
    shuffled = random.Random(0)
    for turn in range(20):
        order = list(episodes)
        if turn:
            shuffled.shuffle(order)
        asked = []
        for name in order:
            prompt = episodes[name]
            place = router.place(prompt, loads)
            router.add(prompt, place)
            loads[place] += 1
            homes[name].add(place)
            asked.append((name, prompt, place))
        for name, prompt, place in asked:
            answered = [*prompt, 1000 + 10 * turn + name[1]]
            router.add(answered, place)
            episodes[name] = [*answered, 7]
            loads[place] -= 1
    assert all(len(found) == 1 for found in homes.values())
    assert [homes[g, 0] for g in range(4)] == [homes[g, 1] for g in range(4)]
    assert sorted(place for [place] in homes.values()) == [0] * 4 + [1] * 4


def test_who_has_too_much_to_do_is_left() -> None:
    router = PrefixRouter()
    router.add([1, 2], 1)
    assert router.place([1, 2, 3], {0: 0, 1: SPARE}) == 1
    assert router.place([1, 2, 3], {0: 0, 1: SPARE + 1}) == 0
    assert router.place([1, 2, 3], {0: 1000, 1: int(RATIO * 1000)}) == 1
    assert router.place([1, 2, 3], {0: 1000, 1: int(RATIO * 1000) + 1}) == 0


def test_the_longest_known_beginning_counts() -> None:
    router = PrefixRouter()
    router.add([1], 0)
    router.add([1, 2, 3], 1)
    router.add([1, 2], 2)
    loads = dict.fromkeys(range(3), 0)
    assert [router.place(t, loads) for t in ([1, 9], [1, 2, 9], [1, 2, 3, 9], [9])] == [0, 2, 1, 0]
    assert router.place([1, 2, 3, 9], {0: 0, 2: 0}) == 2  # where 1 is not there
    router.forget(1)
    assert router.place([1, 2, 3, 9], loads) == 2
    router.forget()
    assert router.place([1, 2, 3, 9], {0: 1, 1: 0, 2: 1}) == 1 and not router._lengths


def test_the_oldest_is_forgotten_first() -> None:
    router = PrefixRouter(kept=2)
    for i in range(3):
        router.add([i], 1)
    router.add([1], 1)  # said again: now the newest
    router.add([5, 6], 1)
    assert [router.place(t, {0: 0, 1: 1}) for t in ([0], [2], [1], [5, 6])] == [0, 0, 1, 1]
    nothing = PrefixRouter(kept=0)
    nothing.add([1], 1)
    assert nothing.place([1], {0: 0, 1: 1}) == 0
