"""Why a record is missing: what the directory remembers, for how long, and when it says that it does not know."""

from __future__ import annotations

from kvfleet.core.departures import Departures
from kvfleet.core.directory import Applied, Delta, Digest, Directory, InventoryPage, NodeId, Run
from kvfleet.core.outcomes import Miss

A, B = NodeId("a" * 32), NodeId("b" * 32)


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def records(*numbers: int, shard: int = 0) -> bytes:
    return b"".join(key(number) + shard.to_bytes(2, "little") for number in numbers)


def inventory(directory: Directory, node: NodeId, held: bytes = b"", *, epoch: int = 1, seq: int = 0) -> None:
    assert directory.inventory(InventoryPage(node, epoch, seq, 0, True, held)) is Applied.OK


def whys(directory: Directory, *numbers: int, num_shards: int = 1) -> list[Miss]:
    return [directory.why(key(number), num_shards) for number in numbers]


def young(*nodes: NodeId) -> Directory:
    """A directory that knows everything from the start: its nodes came empty."""
    directory = Directory(1000)
    directory.expect(frozenset(nodes))
    for node in nodes:
        inventory(directory, node)
    return directory


def tell(directory: Directory, node: NodeId, seq: int, added: bytes = b"", removed: bytes = b"") -> None:
    assert directory.apply(Delta(node, 1, seq, added, removed)) is Applied.OK


# --- the memory


def test_at_least_one_generation_is_remembered_and_at_most_two() -> None:
    departures = Departures(generation_max=3)
    for number in range(5):
        departures.note(bytes([number]), Miss.EVICTED)
    assert (len(departures), departures.complete) == (5, True)
    departures.note(b"\5", Miss.HOLDER_LOST)
    assert (len(departures), departures.complete) == (3, False)
    assert [departures.why(bytes([number])) for number in (2, 3, 5)] == [None, Miss.EVICTED, Miss.HOLDER_LOST]


def test_the_later_news_counts() -> None:
    departures = Departures(generation_max=2)
    departures.note(b"a", Miss.EVICTED)
    departures.note(b"b", Miss.EVICTED)
    departures.note(b"a", Miss.NOT_ADMITTED)
    departures.note_late(b"a", Miss.HOLDER_LOST)
    departures.note_late(b"b", Miss.HOLDER_LOST)
    assert (departures.why(b"a"), departures.why(b"b")) == (Miss.NOT_ADMITTED, Miss.EVICTED)
    departures.forget([b"a", b"c"])
    assert (departures.why(b"a"), departures.why(b"b"), len(departures)) == (None, Miss.EVICTED, 1)
    departures.note_late(b"a", Miss.HOLDER_LOST)
    assert departures.why(b"a") is Miss.HOLDER_LOST


# --- the directory


def test_what_no_node_ever_had() -> None:
    directory = young(A, B)
    tell(directory, A, 1, added=records(1))
    assert whys(directory, 2) == [Miss.NEVER_STORED]


def test_what_was_evicted_from_its_last_node() -> None:
    directory = young(A, B)
    tell(directory, A, 1, added=records(1, 2))
    tell(directory, B, 1, added=records(1))
    tell(directory, A, 2, removed=records(1, 2))
    assert directory.locate(key(1), 0, 1) == [Run(0, 1, (B,), False)]
    assert whys(directory, 2) == [Miss.EVICTED]
    assert directory.stats().departed == 1
    tell(directory, B, 2, removed=records(1))
    assert whys(directory, 1, 2) == [Miss.EVICTED, Miss.EVICTED]


def test_what_comes_again_is_not_remembered() -> None:
    directory = young(A, B)
    tell(directory, A, 1, added=records(1))
    tell(directory, A, 2, removed=records(1))
    tell(directory, B, 1, added=records(1))
    assert directory.stats().departed == 0
    directory.drop_node(B)
    assert whys(directory, 1) == [Miss.HOLDER_LOST]


def test_what_went_with_its_node() -> None:
    directory = young(A, B)
    tell(directory, A, 1, added=records(1, 2))
    tell(directory, B, 1, added=records(2))
    directory.drop_node(A)
    assert directory.locate(key(2), 0, 1) == [Run(0, 1, (B,), False)]
    assert whys(directory, 1) == [Miss.HOLDER_LOST]
    tell(directory, B, 2, removed=records(2))
    assert whys(directory, 1, 2, 3) == [Miss.HOLDER_LOST, Miss.EVICTED, Miss.NEVER_STORED]


def test_a_loss_is_known_before_the_rows_are_cleaned_out(monkeypatch) -> None:
    monkeypatch.setattr("kvfleet.core.rows.SWEEP_ROWS", 1)
    directory = young(A, B)
    numbers = [number * 131 % 65521 for number in range(500)]
    tell(directory, A, 1, added=records(*numbers))
    directory.drop_node(A)
    stats = directory.stats()
    assert (stats.rows, stats.departed) == (499, 1)
    assert set(whys(directory, *numbers)) == {Miss.HOLDER_LOST}
    for seq in range(1, 600):
        tell(directory, B, seq)
    stats = directory.stats()
    assert (stats.rows, stats.departed) == (0, 500)
    assert set(whys(directory, *numbers)) == {Miss.HOLDER_LOST}


def test_what_a_node_has_not_brought_back() -> None:
    directory = young(A)
    tell(directory, A, 1, added=records(1, 2, 3))
    inventory(directory, A, records(2, 3), seq=1)
    assert whys(directory, 1) == [Miss.EVICTED]
    inventory(directory, A, records(3), epoch=2)
    assert whys(directory, 1, 2, 4) == [Miss.EVICTED, Miss.HOLDER_LOST, Miss.NEVER_STORED]


def test_what_found_no_room() -> None:
    directory = young(A, B)
    tell(directory, B, 1, added=records(2))
    assert directory.apply(Delta(A, 1, 1, not_admitted=records(1, 2))) is Applied.OK
    assert whys(directory, 1, 3) == [Miss.NOT_ADMITTED, Miss.NEVER_STORED]
    tell(directory, B, 2, removed=records(2))
    assert whys(directory, 2) == [Miss.EVICTED]
    assert directory.apply(Delta(A, 1, 2, not_admitted=records(2), digest=Digest.of(b""))) is Applied.OK
    assert whys(directory, 2) == [Miss.NOT_ADMITTED]


def test_the_first_shard_that_is_missing_says_why() -> None:
    directory = young(A)
    tell(directory, A, 1, added=records(1) + records(1, shard=1) + records(2))
    tell(directory, A, 2, removed=records(1, shard=1))
    assert whys(directory, 1, 2, num_shards=2) == [Miss.EVICTED, Miss.NEVER_STORED]


def test_what_has_left_the_shared_tier() -> None:
    directory = young(A)
    tell(directory, A, 1, added=records(1))
    directory.apply(Delta(A, 1, 2, shared_added=records(1), removed=records(1)))
    assert directory.locate(key(1), 0, 1) == [Run(0, 1, (), True)]
    directory.apply(Delta(A, 1, 3, shared_removed=records(1)))
    assert whys(directory, 1, 2) == [Miss.EVICTED, Miss.NEVER_STORED]


# --- what it cannot know


def test_nobody_has_spoken_yet() -> None:
    directory = Directory(10)
    assert whys(directory, 1) == [Miss.UNKNOWN]
    assert directory.apply(Delta(A, 1, 1)) is Applied.NEED_INVENTORY
    assert whys(directory, 1) == [Miss.UNKNOWN]
    inventory(directory, A)
    assert whys(directory, 1) == [Miss.UNKNOWN]  # there may be others
    directory.expect(frozenset())
    assert whys(directory, 1) == [Miss.NEVER_STORED]


def test_one_that_has_not_spoken_may_have_it() -> None:
    directory = young(A)
    directory.expect(frozenset({A, B}))
    assert whys(directory, 1) == [Miss.UNKNOWN]
    assert directory.apply(Delta(B, 1, 1)) is Applied.NEED_INVENTORY
    assert whys(directory, 1) == [Miss.UNKNOWN]
    directory.expect(frozenset({A}))
    assert whys(directory, 1) == [Miss.UNKNOWN]  # it has spoken: it has a manager
    inventory(directory, B)
    assert whys(directory, 1) == [Miss.NEVER_STORED]
    directory.expect(frozenset({A, B}))
    directory.drop_node(B)
    assert whys(directory, 1) == [Miss.NEVER_STORED]


def test_a_node_that_brings_blocks_had_a_past() -> None:
    directory = young(A)
    inventory(directory, B, records(1))
    assert whys(directory, 2) == [Miss.UNKNOWN]
    directory.drop_node(B)
    assert whys(directory, 1, 2) == [Miss.HOLDER_LOST, Miss.UNKNOWN]


def test_a_shared_tier_with_contents_had_a_past() -> None:
    directory = young(A)
    directory.apply(Delta(A, 1, 1, added=records(1), shared_added=records(1)))
    assert whys(directory, 2) == [Miss.NEVER_STORED]
    directory.apply(Delta(A, 1, 2, shared_added=records(1, 3)))
    assert whys(directory, 2) == [Miss.UNKNOWN]


def test_what_was_refused_may_be_there() -> None:
    directory = Directory(2)
    directory.expect(frozenset({A}))
    inventory(directory, A)
    tell(directory, A, 1, added=records(1, 2, 3))
    assert whys(directory, 3, 4) == [Miss.UNKNOWN, Miss.UNKNOWN]


def test_what_is_on_its_way_may_be_there() -> None:
    directory = young(A, B)
    assert directory.inventory(InventoryPage(A, 1, 1, 0, False, records(1, 2))) is Applied.OK
    assert whys(directory, 1, 3) == [Miss.UNKNOWN, Miss.NEVER_STORED]
    assert directory.inventory(InventoryPage(A, 1, 1, 2, False, records(3))) is Applied.NEED_INVENTORY
    assert whys(directory, 1) == [Miss.UNKNOWN]
    inventory(directory, A, records(2), seq=1)
    assert whys(directory, 1) == [Miss.UNKNOWN]
    assert directory.inventory(InventoryPage(B, 1, 0, 0, False, records(5))) is Applied.OK
    directory.drop_node(B)
    assert whys(directory, 5) == [Miss.HOLDER_LOST]


def test_what_is_forgotten_is_not_said_to_be_new() -> None:
    directory = Directory(1000)
    directory._rows.departures = Departures(2)
    directory.expect(frozenset({A}))
    inventory(directory, A)
    tell(directory, A, 1, added=records(1, 2, 3, 4))
    tell(directory, A, 2, removed=records(1, 2, 3))
    assert whys(directory, 1, 2, 3, 9) == [Miss.EVICTED, Miss.EVICTED, Miss.EVICTED, Miss.NEVER_STORED]
    tell(directory, A, 3, removed=records(4))
    assert whys(directory, 1, 4, 9) == [Miss.UNKNOWN, Miss.EVICTED, Miss.UNKNOWN]


def test_what_the_shared_tier_has_lost_is_told_from_what_had_to_make_room() -> None:
    directory = young(A)
    directory.apply(Delta(A, 1, 1, added=records(1, 2, 3), shared_added=records(1, 2, 3)))
    directory.apply(Delta(A, 1, 2, removed=records(1, 2, 3)))
    directory.apply(Delta(A, 1, 3, shared_removed=records(1, 2), shared_lost=records(1)))
    assert whys(directory, 1, 2) == [Miss.OBJECT_LOST, Miss.EVICTED]
    directory.apply(Delta(A, 1, 4, shared_added=records(3), shared_lost=records(3)))  # written again since it was lost
    assert directory.locate(key(3), 0, 1) == [Run(0, 1, (), True)]
