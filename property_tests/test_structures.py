"""The persistent structures of the core against plain ones."""

from bisect import insort

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbfn import prefix, sequence
from cbfn.ordered import OrderedInts
from cbfn.sequence import ChunkTable, TokenLog
from cbfn.testing import strategies

# runs hold 512, so a few spans of hundreds split them
_SPANS = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 3000), st.integers(1, 700), st.sampled_from([1, -1, 7])
    ),
    max_size=5,
)


@given(spans=_SPANS, probes=st.lists(st.integers(-10, 4000), max_size=20))
def test_ordered_set_equals_a_sorted_list(spans, probes):
    numbers, reference = OrderedInts(), []
    for add, start, count, step in spans:
        before, copied = numbers, list(numbers)
        for number in range(start, start + count)[:: 1 if step > 0 else -1][:: abs(step)]:
            if add and number not in reference:
                insort(reference, number)
            if not add and number in reference:
                reference.remove(number)
            numbers = numbers.add(number) if add else numbers.discard(number)
        assert list(before) == copied
        assert all(0 < len(run) <= 512 for run in numbers.runs)
    assert list(numbers) == reference
    assert list(reversed(numbers)) == reference[::-1]
    assert len(numbers) == len(reference)
    assert [p in numbers for p in probes] == [p in reference for p in probes]
    for probe in probes:
        assert (numbers.add(probe) is numbers) == (probe in reference)
        assert (numbers.discard(probe) is numbers) == (probe not in reference)
        if -len(reference) <= probe < len(reference):
            assert numbers[probe] == reference[probe]
        else:
            with pytest.raises(IndexError):
                numbers[probe]


@given(
    first=strategies.prompts(),
    second=strategies.prompts(),
    page=st.integers(1, 4),
    versions=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_chained_digests_are_equal_exactly_where_the_prefixes_are(first, second, page, versions):
    digests = []
    for tokens, version in zip((first, second), versions, strict=True):
        log, root = TokenLog(np.array(tokens, np.int32)), prefix.root_digest(version)
        digests.append([log.digest(root, page, i) for i in range(len(tokens) // page)])
    for i, one in enumerate(digests[0]):
        for j, other in enumerate(digests[1]):
            same = first[: (i + 1) * page] == second[: (j + 1) * page]
            assert (one == other) == (same and versions[0] == versions[1])
            assert len(one) == prefix.DIGEST_BYTES == 16


@given(
    prompt=strategies.prompts(),
    generated=st.lists(st.integers(0, 39), max_size=12),
    page=st.integers(1, 4),
)
def test_digest_does_not_depend_on_what_is_prompt_and_what_was_generated(prompt, generated, page):
    tokens, root = np.array([*prompt, *generated], np.int32), prefix.root_digest(0)
    log = TokenLog(np.array(prompt, np.int32))
    for number, token in enumerate(generated):
        log = log.append(number, token)
    whole = TokenLog(tokens)
    for block in range(len(tokens) // page):
        assert log.digest(root, page, block) == whole.digest(root, page, block)
    other = prefix.root_digest(1)
    for block in range(len(tokens) // page):
        assert log.digest(other, page, block) != whole.digest(root, page, block)


@given(
    prompt=strategies.prompts(),
    forks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 39)), max_size=20),
)
def test_old_logs_keep_their_tokens_where_they_are_forked(prompt, forks):
    logs = [(TokenLog(np.array(prompt, np.int32)), 0, [*prompt])]
    for pick, token in forks:
        log, length, tokens = logs[pick % len(logs)]
        copied = len(log.generated) != length  # somebody else has gone on with it
        longer = log.append(length, token)
        assert (longer is log) != copied
        logs.append((longer, length + 1, [*tokens, token]))
        for log, length, tokens in logs:
            assert len(log.generated) >= length
            for start in range(0, len(tokens) + 1, 3):
                assert log.tokens(start, len(tokens)).tolist() == tokens[start:]
                assert log.tokens(0, start).tolist() == tokens[:start]


_WRITES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(1, 40), st.booleans()),
    max_size=8,
)


@given(writes=_WRITES, width=st.integers(0, 140))
def test_chunk_table_equals_a_dictionary(writes, width):
    table, reference, number = ChunkTable((), 4), {}, 0
    for shift, first, count, one_value in writes:
        columns = np.arange(first, first + count, dtype=np.int32)
        seats = (np.arange(count) + shift).astype(np.int32) % 4
        chunks = number if one_value else np.arange(number, number + count, dtype=np.int32)
        number += count
        before = table
        seen = before.columns(np.arange(4), width)
        table = table.put(seats, columns, chunks)
        assert np.array_equal(before.columns(np.arange(4), width), seen)
        values = np.broadcast_to(chunks, (count,)).tolist()
        for seat, column, value in zip(seats.tolist(), columns.tolist(), values, strict=True):
            reference[seat, column] = value
        assert table.get(seats, columns).tolist() == values
    expected = [[reference.get((seat, column), 0) for seat in (2, 0, 3)] for column in range(width)]
    assert table.columns(np.array([2, 0, 3]), width).tolist() == expected


@given(
    spec=strategies.cache_specs(),
    holds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=6),
    drops=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=4),
)
def test_seats_give_back_exactly_the_chunks_they_hold_the_deepest_first(spec, holds, drops):
    s, number = sequence.init(spec, 4), 2
    held = {t: {seat: [] for seat in range(4)} for t in spec.attention_types}
    first = {t: [0] * 4 for t in spec.attention_types}
    for seat, count in holds:
        for t in spec.attention_types:
            chunks = np.arange(number, number + count, dtype=np.int32)
            number += count
            s = sequence.hold(s, t, np.array([seat]), np.array([count]), chunks)
            held[t][seat] += chunks.tolist()
    for seat, count in drops:
        for t in spec.attention_types:
            gone = held[t][seat][:count]
            s, chunks = sequence.drop(
                s, t, np.array([seat]), np.array([first[t][seat] + len(gone)])
            )
            assert chunks.tolist() == gone[::-1]
            first[t][seat] += len(gone)
            del held[t][seat][:count]
    for t in spec.attention_types:
        for seat in range(4):
            row = s.tables[t].columns(np.array([seat]), int(s.end[t][seat]))[:, 0].tolist()
            assert row == [0] * first[t][seat] + held[t][seat]
    s, chunks = sequence.vacate(s, np.arange(4))
    everything = [held[t][seat] for t in spec.attention_types for seat in (3, 2, 1, 0)]
    assert chunks.tolist() == [chunk for part in everything for chunk in part[::-1]]
    for t in spec.attention_types:
        assert not s.tables[t].columns(np.arange(4), int(s.end[t].max())).any()
