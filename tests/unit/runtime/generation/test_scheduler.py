"""The bookkeeping of continuous batching, with sequences that end at random."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.runtime.generation.scheduler import Blocks, Row, Scheduler

LONGEST = 20


def waiting(requests: list[tuple[int, int]]) -> list[Row]:
    """Queues (key, tokens of the prompt) of each; one key has one length."""
    length = {}
    return [Row(n, key, *[length.setdefault(key, size)] * 2) for n, (key, size) in enumerate(requests)]


def check_rows(scheduler: Scheduler, keys: dict[int, Row]) -> None:
    """Checks that no two rows write to one block, and that none is lost or taken twice."""
    blocks = scheduler.blocks
    uses = [0] * blocks.num_blocks
    written = set()
    for index, row in enumerate(scheduler.rows):
        assert len(set(row.blocks)) == len(row.blocks) >= blocks.needed(scheduler.num_cached(row))
        assert not scheduler.one_block or row.blocks == [index]
        assert scheduler.tables_BM[index, : len(row.blocks)].tolist() == row.blocks
        for place, block in enumerate(row.blocks):
            uses[block] += 1
            if place >= row.num_prompt // blocks.size:  # it holds more than the prompt
                assert block not in written
                written.add(block)
    assert sum(use == 0 for use in uses) == blocks.num_free
    shared = [block for block in range(blocks.num_blocks) if uses[block] > 1]
    assert not written & set(shared)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 11)), min_size=1, max_size=14),
    size=st.integers(1, 24),
    max_rows=st.integers(1, 6),
    spare=st.integers(0, 12),
    batches_admissions=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
def test_everybody_gets_through(requests, size, max_rows, spare, batches_admissions, chance):
    blocks = Blocks(-(-LONGEST // size) + spare, size)
    one_block = size >= LONGEST
    scheduler = Scheduler(
        blocks, max_rows, prefill_tokens=16, one_block=one_block, batches_admissions=batches_admissions
    )
    line = waiting(requests)
    keys = {one.request: one for one in line}
    scheduler.waiting.extend(line)
    order, left = [], {one.request for one in line}
    while left:
        admitted = scheduler.admit()
        for one in admitted:
            order.append(one.row.request)
            if one.donor is not None:
                donor, prompt = scheduler.rows[one.donor], one.row.num_prompt
                assert donor.key == one.row.key and donor.request != one.row.request
                whole = prompt // size
                assert donor.blocks[:whole] == one.row.blocks[:whole]
                assert one.copy == ((donor.blocks[whole], one.row.blocks[whole]) if prompt % size else None)
        fresh = [one.row.base for one in admitted if one.donor is None]
        assert len(fresh) <= 1 or sum(fresh) <= 16
        check_rows(scheduler, keys)
        assert scheduler.rows, "nobody can go on"
        before = len(scheduler.rows)
        preempted = scheduler.grow()
        assert len(scheduler.rows) == before - len(preempted) and (not one_block or not preempted)
        check_rows(scheduler, keys)
        full = [i for i, row in enumerate(scheduler.rows) if scheduler.num_cached(row) >= LONGEST]
        ended = sorted({i for i in range(len(scheduler.rows)) if chance.random() < 0.2} | set(full))
        names = [row.request for row in scheduler.rows]
        new_order, copies = scheduler.remove(ended)
        left -= {names[i] for i in ended}
        assert [row.request for row in scheduler.rows] == [names[i] for i in new_order]
        assert not set(new_order) & set(ended) and len(new_order) == len(names) - len(ended)
        assert one_block or not copies
        check_rows(scheduler, keys)
    assert blocks.num_free == blocks.num_blocks
    first = [order.index(one.request) for one in line]
    assert first == sorted(first), "first come, first served"


def test_the_youngest_leaves_and_comes_back_first():
    scheduler = Scheduler(Blocks(4, 4), 3, prefill_tokens=100)
    scheduler.waiting.extend(waiting([(0, 4), (1, 3), (2, 2)]))
    assert [one.row.request for one in scheduler.admit()] == [0, 1, 2]
    assert scheduler.grow() == []  # request 0 takes the last block
    assert scheduler.grow() == [2]  # request 1 needs one
    assert list(scheduler.waiting) == [Row(2, 2, 2, 4)]  # its prompt, a token that it has drawn, and one at hand
    assert scheduler.admit() == []  # a block is free, but not one to spare
    scheduler.remove([0])
    (back,) = scheduler.admit()
    assert back.row.request == 2 and back.donor is None and back.row.base == 4


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(2, 24),
    max_rows=st.integers(1, 6),
    spare=st.integers(0, 12),
    batches_admissions=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
def test_rows_outside_keep_what_they_have(size, max_rows, spare, batches_admissions, chance):
    """Rows leave for an answer and come back with more tokens, or are over; whatever moves, the block that a row names
    holds its tokens, unless the row is in the queue again."""
    one_block = size >= LONGEST
    blocks = Blocks(max_rows + spare if one_block else -(-LONGEST // size) + spare, size)
    scheduler = Scheduler(
        blocks, max_rows, prefill_tokens=16, one_block=one_block, batches_admissions=batches_admissions
    )
    line = waiting([(key, 1 + key) for key in range(9)])
    scheduler.waiting.extend(line)
    left, stored = {one.request for one in line}, dict.fromkeys(range(blocks.num_blocks), -1)  # block -> last writer

    def move(copies) -> None:
        before = dict(stored)
        stored.update({to: before[source] for source, to, _ in copies})

    def check() -> None:
        rows = [*scheduler.rows, *scheduler.outside.values()]
        assert [row.blocks for row in scheduler.rows] == [[i] for i in range(len(scheduler.rows))] or not one_block
        used = [block for row in rows for block in row.blocks]
        assert len(set(used)) == len(used) == blocks.num_blocks - blocks.num_free
        assert all(stored[block] == row.request for row in rows for block in row.blocks)
        assert sum(bool(row.blocks) for row in rows) <= max_rows

    while left:
        scheduler.grow()
        for row in scheduler.rows:  # what grew
            stored.update(dict.fromkeys(row.blocks, row.request))
        for row in [row for row in scheduler.outside.values() if chance.random() < 0.5]:
            cached = row.base
            if cached >= LONGEST - 4 or chance.random() < 0.3:
                scheduler.finish(row.request)
                left.discard(row.request)
            elif scheduler.resume(row.request, 3) is not None:
                assert row is scheduler.rows[-1] and scheduler.num_cached(row) == cached + 3
            else:
                assert scheduler.waiting[0].base == cached + 3 and not one_block
            for copies in scheduler.moves:
                move(copies)
            scheduler.moves.clear()
            for row in scheduler.rows:
                stored.update(dict.fromkeys(row.blocks[1:], row.request))
            check()
        admitted = scheduler.admit()
        for copies in scheduler.moves:
            move(copies)
        scheduler.moves.clear()
        for one in admitted:
            stored.update(dict.fromkeys(one.row.blocks, one.row.request))
        check()
        rows = range(len(scheduler.rows))
        ended = [i for i in rows if scheduler.num_cached(scheduler.rows[i]) >= LONGEST or chance.random() < 0.1]
        away = [i for i in rows if i not in ended and chance.random() < 0.4]
        left -= {scheduler.rows[i].request for i in ended}
        order, copies = scheduler.remove(ended, away)
        assert not {*order} & {*ended, *away}
        move(copies)
        check()
    assert blocks.num_free == blocks.num_blocks


def test_who_need_not_wait_for_other_free_rows():
    """The rest of prompts that one pass can't take, and what comes to an empty queue; the others do."""
    scheduler = Scheduler(Blocks(99, 4), 16, prefill_tokens=16, batches_admissions=True)
    scheduler.waiting.extend(waiting([(n, 4) for n in range(22)]))
    taken = []
    for ended in [[], [], [], [], [0], [0], [0, 1], [], []]:
        scheduler.grow()
        taken.append(len(scheduler.admit()))
        scheduler.remove(ended)
    # four prompts fill a pass; then a row waits until an eighth of the rows have left
    assert taken == [4, 4, 4, 4, 0, 0, 2, 2, 0], taken
    scheduler.waiting.clear()
    scheduler.remove([0])
    for new in ([], [Row(22, 22, 4, 4)]):
        scheduler.waiting.extend(new)
        scheduler.grow()
        assert len(scheduler.admit()) == len(new)
