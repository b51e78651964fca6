"""Which replica `Routes` prefers."""

import random

from mesh_transformer.pod.prefixes import Routes


def test_a_beginning_stays_on_its_replica_and_others_go_to_the_least_busy_one():
    routes = Routes(rows=8)
    idle = {"a": 0, "b": 0}
    assert routes.order([1, 2], idle)[0] == "a"
    assert routes.order([7], idle)[0] == "b"  # the one that was chosen longest ago
    for _ in range(3):
        assert routes.order([1, 2, 3], {"a": 1, "b": 0}) == ["a", "b"]
        assert routes.order([7, 2], {"a": 0, "b": 2}) == ["a", "b"]  # 2 is the longest one known
    assert routes.order([9], {"a": 3, "b": 2})[0] == "b"


def test_a_much_busier_replica_loses_a_beginning():
    routes = Routes(rows=8)
    routes.order([1], {"a": 0, "b": 0})
    for ongoing, expected in (
        ({"a": 2, "b": 0}, "a"),
        ({"a": 8, "b": 3}, "a"),
        ({"a": 9, "b": 3}, "b"),
        ({"a": 0, "b": 1}, "b"),  # which has answered it since
    ):
        assert routes.order([1], ongoing)[0] == expected


def test_replicas_that_have_ended_are_not_chosen():
    routes = Routes(rows=8)
    assert routes.order([1], {"a": 0}) == ["a"]
    assert routes.order([1], {"b": 5}) == ["b"]
    assert routes.order([1], {}) == []


def test_the_least_recently_used_beginnings_are_forgotten():
    routes = Routes(rows=8, kept=2)
    for prefix in (1, 2, 1, 3):
        routes.order([prefix], {"a": 0})
    # "b" is preferred for what is forgotten, as it was never chosen.
    chosen = [Routes.order(routes, [prefix], {"a": 0, "b": 0})[0] for prefix in (1, 3)]
    assert chosen == ["a", "a"]
    assert routes.order([2], {"a": 0, "b": 0})[0] == "b"


def test_random_conversations_are_spread_and_stay():
    """Each of 40 conversations grows by a message per turn; all turns reach the same replica."""
    rng = random.Random(0)
    routes, homes = Routes(rows=16), {}
    for _ in range(400):
        name = rng.randrange(40)
        turns = [hash((name, turn)) for turn in range(rng.randrange(1, 20))]
        home = routes.order(turns, {"a": 10, "b": 10, "c": 10})[0]
        assert homes.setdefault(name, home) == home
    counts = [list(homes.values()).count(replica) for replica in "abc"]
    assert min(counts) >= 10  # of 40 / 3; with equally busy ones, the choice goes round
