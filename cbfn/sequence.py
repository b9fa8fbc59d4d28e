"""The active requests as one table of read-only arrays, and their tokens as append-only logs.

A seat is a request's place in the table, kept from its admission to its end or preemption. All
numbers that change with every step stand in columns indexed by seat, so that a transition is a
handful of vectorised copies whatever the contexts' lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int, Int32, Int64

from cbfn.pages import Chunks, frozen
from cbfn.prefix import Digest, next_digest
from cbfn.tokens import TokenIds
from cbfn.types import CacheSpec

_SLAB = 32


class TokenLog:
    """The tokens of one request: its prompt, and generated tokens that are only ever appended.

    States share a log and know how much of it is theirs, which makes an append cheap and keeps old
    states as they were. Where two states append to the same log, the second works on a copy.
    """

    __slots__ = ("_digests", "_listed", "_root", "generated", "prompt")

    def __init__(self, prompt: Int32[np.ndarray, "N"], generated: array[int] | None = None) -> None:
        self.prompt = prompt
        self.generated = array("i") if generated is None else generated
        self._listed: list[int] = []
        self._digests: list[Digest] = []
        self._root: Digest | None = None

    def append(self, length: int, token: int) -> TokenLog:
        """Returns a log of the first `length` generated tokens and `token` behind them."""
        log = self
        if len(self.generated) != length:
            log = TokenLog(self.prompt, self.generated[:length])
        log.generated.append(token)
        return log

    def tokens(self, start: int, end: int) -> Int32[np.ndarray, "n"]:
        """Returns the tokens at positions `start` to `end - 1`."""
        border = len(self.prompt)
        if end <= border:
            return self.prompt[start:end]
        generated = np.array(self.generated[max(start - border, 0) : end - border], np.int32)
        return (
            np.concatenate([self.prompt[start:border], generated]) if start < border else generated
        )

    def ids(self, length: int) -> TokenIds:
        """Returns the first `length` generated tokens as a list.

        What was listed once is copied, so that reading every output of a request stays cheap.
        """
        listed = self._listed
        have = len(listed)
        if have < length:  # in place, for outputs are read from any thread: twice is harmless
            listed[have:length] = self.generated[have:length].tolist()
        ids = TokenIds(listed)
        if len(ids) > length:  # some other reader was further
            list.__delitem__(ids, slice(length, None))
        return ids

    def digest(self, root: Digest, page_size: int, block: int) -> Digest:
        """Returns the chained digest of a block of known tokens; each is computed once."""
        if self._root != root:
            self._root, self._digests = root, []
        digests = self._digests
        while len(digests) <= block:
            start = len(digests) * page_size
            parent = digests[-1] if digests else root
            digests.append(next_digest(parent, self.tokens(start, start + page_size)))
        return digests[block]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of each seat in order, 0 (a null chunk) where none is held.

    Columns are kept in slabs, so that a write copies the slabs that it touches and not the table.
    """

    slabs: tuple[Int32[np.ndarray, "columns seats"], ...]
    num_seats: int

    def put(
        self,
        seats: Int[np.ndarray, "n"],
        columns: Int[np.ndarray, "n"],
        chunks: Int[np.ndarray, "n"] | int,
    ) -> ChunkTable:
        """Returns the table with `chunks[i]` at (seats[i], columns[i])."""
        if not len(seats):
            return self
        slabs = list(self.slabs)
        while len(slabs) * _SLAB <= columns.max():
            slabs.append(frozen(np.zeros((_SLAB, self.num_seats), np.int32)))
        for at, mine in _by_slab(columns):
            slab = slabs[at].copy()
            values = chunks if isinstance(chunks, int) else chunks[mine]
            slab[columns[mine] - at * _SLAB, seats[mine]] = values
            slabs[at] = frozen(slab)
        return ChunkTable(tuple(slabs), self.num_seats)

    def get(
        self, seats: Int[np.ndarray, "n"], columns: Int[np.ndarray, "n"]
    ) -> Int32[np.ndarray, "n"]:
        """Returns the chunks at (seats[i], columns[i])."""
        chunks = np.zeros(len(seats), np.int32)
        for at, mine in _by_slab(columns):
            chunks[mine] = self.slabs[at][columns[mine] - at * _SLAB, seats[mine]]
        return chunks

    def columns(self, seats: Int[np.ndarray, "B"], width: int) -> Int32[np.ndarray, "width B"]:
        """Returns the first `width` columns of `seats`, one column after the other."""
        parts = [
            slab[: width - at * _SLAB].take(seats, axis=1)
            for at, slab in enumerate(self.slabs[: -(-width // _SLAB)])
        ]
        missing = width - sum(map(len, parts))
        if missing or not parts:
            parts.append(np.zeros((missing, len(seats)), np.int32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _by_slab(columns: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yields each slab that `columns` touch, with the indices of its entries."""
    if len(columns):
        places = columns // _SLAB
        first, last = int(places.min()), int(places.max())
        if first == last:
            yield first, slice(None)
        else:
            for at in np.unique(places).tolist():
                yield at, np.flatnonzero(places == at)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The active requests; an empty seat has serial -1.

    Set at admission: `request`, `request_id`, `log`, `serial`, `epoch`, `prompt_len`,
    `prefill_len` (tokens to compute before the first sampled one: a resumed request computes its
    generated tokens again, unless their KV was kept), `limit` (tokens at which the request ends
    with "length"), `stop_ids` (padded with -1), the sampling columns, `num_cached`, `weights` (the
    version that its KV is computed with) and `scheduled_at`.

    Counts, planned steps included: `num_tokens` (tokens there are, known or sampled in flight),
    `num_computed` (of them those whose KV is there or in flight), and for each attention type
    `first` and `end`: chunk columns `first` to `end - 1` are held.

    Values, committed steps only: `num_generated`, `last_token`, `first_token_at`, `last_token_at`.

    `last_planned` is the scheduler's count of admissions when the seat was last in a plan. `order`
    holds the occupied seats in order of arrival.
    """

    request: np.ndarray
    request_id: np.ndarray
    log: np.ndarray
    serial: Int64[np.ndarray, "seats"]
    epoch: Int32[np.ndarray, "seats"]
    prompt_len: Int32[np.ndarray, "seats"]
    prefill_len: Int32[np.ndarray, "seats"]
    limit: Int32[np.ndarray, "seats"]
    stop_ids: Int32[np.ndarray, "seats width"]
    temperature: Float32[np.ndarray, "seats"]
    top_k: Int32[np.ndarray, "seats"]
    top_p: Float32[np.ndarray, "seats"]
    min_p: Float32[np.ndarray, "seats"]
    seed: Int64[np.ndarray, "seats"]
    num_cached: Int32[np.ndarray, "seats"]
    weights: Int32[np.ndarray, "seats"]
    scheduled_at: Float64[np.ndarray, "seats"]
    num_tokens: Int32[np.ndarray, "seats"]
    num_computed: Int32[np.ndarray, "seats"]
    num_generated: Int32[np.ndarray, "seats"]
    last_token: Int32[np.ndarray, "seats"]
    first_token_at: Float64[np.ndarray, "seats"]
    last_token_at: Float64[np.ndarray, "seats"]
    last_planned: Int64[np.ndarray, "seats"]
    tables: Mapping[str, ChunkTable]
    first: Mapping[str, Int32[np.ndarray, "seats"]]
    end: Mapping[str, Int32[np.ndarray, "seats"]]
    order: Int32[np.ndarray, "n"]

    @property
    def num_seats(self) -> int:
        return len(self.serial)

    @property
    def num_known(self) -> Int32[np.ndarray, "seats"]:
        """Tokens whose values are known: the prompt and the committed ones."""
        return self.prompt_len + self.num_generated


def init(spec: CacheSpec, num_seats: int) -> Sequences:
    """Returns a table of empty seats."""

    def column(dtype: Any, fill: Any = 0) -> np.ndarray:
        return frozen(np.full(num_seats, fill, dtype))

    return Sequences(
        **{name: column(object, None) for name in ("request", "request_id", "log")},
        **{name: column(np.int32) for name in _COUNTS},
        **{name: column(np.float32) for name in ("temperature", "top_p", "min_p")},
        **{name: column(np.float64, np.nan) for name in _MOMENTS},
        seed=column(np.int64),
        last_planned=column(np.int64),
        serial=column(np.int64, -1),
        stop_ids=frozen(np.full((num_seats, 1), -1, np.int32)),
        tables={t: ChunkTable((), num_seats) for t in spec.attention_types},
        first={t: column(np.int32) for t in spec.attention_types},
        end={t: column(np.int32) for t in spec.attention_types},
        order=frozen(np.zeros(0, np.int32)),
    )


_MOMENTS = ("scheduled_at", "first_token_at", "last_token_at")
_COUNTS = [
    "epoch",
    "prompt_len",
    "prefill_len",
    "limit",
    "top_k",
    "num_cached",
    "weights",
    "num_tokens",
    "num_computed",
    "num_generated",
    "last_token",
]


def update(sequences: Sequences, seats: Any, **columns: Any) -> Sequences:
    """Returns the table with each named column set at `seats`."""
    changed: dict[str, Any] = {}
    for name, values in columns.items():
        column = getattr(sequences, name).copy()
        column[seats] = values
        changed[name] = frozen(column)
    return replace(sequences, **changed)


def hold(
    sequences: Sequences, attention_type: str, seats: np.ndarray, counts: np.ndarray, chunks: Chunks
) -> Sequences:
    """Returns the table where `seats[i]` holds `counts[i]` more of `chunks`, taken in order."""
    end = sequences.end[attention_type].copy()
    rows, columns = _spread(seats, end[seats], counts)
    end[seats] += counts
    return _with_type(
        sequences,
        attention_type,
        tables=sequences.tables[attention_type].put(rows, columns, chunks),
        end=frozen(end),
    )


def drop(
    sequences: Sequences, attention_type: str, seats: np.ndarray, new_first: np.ndarray
) -> tuple[Sequences, Chunks]:
    """Returns the table where seats hold nothing before column `new_first[i]`, and what was there.

    Of each seat's chunks the deepest comes first.
    """
    first = sequences.first[attention_type].copy()
    table = sequences.tables[attention_type]
    rows, columns = _spread(seats, first[seats], new_first - first[seats])
    first[seats] = new_first
    sequences = _with_type(
        sequences, attention_type, tables=table.put(rows, columns, 0), first=frozen(first)
    )
    return sequences, table.get(rows, columns)[::-1]


def vacate(sequences: Sequences, seats: np.ndarray) -> tuple[Sequences, Chunks]:
    """Returns the table with `seats` empty, and all chunks that they held, the deepest first."""
    held = []
    for attention_type in sequences.tables:
        end = sequences.end[attention_type][seats]
        sequences, chunks = drop(sequences, attention_type, seats, end)
        held.append(chunks)
    sequences = update(sequences, seats, serial=-1, request=None, request_id=None, log=None)
    order = sequences.order[sequences.serial[sequences.order] >= 0]
    return replace(sequences, order=frozen(order)), np.concatenate(held)


def occupy(
    sequences: Sequences, seats: np.ndarray, first: Mapping[str, np.ndarray], **columns: Any
) -> Sequences:
    """Returns the table with empty `seats` taken; they hold chunks from column `first[i]` on."""
    sequences = update(sequences, seats, **columns)
    for attention_type, starts in first.items():
        begin = sequences.first[attention_type].copy()
        begin[seats] = starts
        end = sequences.end[attention_type].copy()
        end[seats] = starts
        sequences = _with_type(sequences, attention_type, first=frozen(begin), end=frozen(end))
    order = np.concatenate([sequences.order, seats])
    order = order[np.argsort(sequences.serial[order], kind="stable")]
    return replace(sequences, order=frozen(order))


def widen_stop_ids(sequences: Sequences, width: int) -> Sequences:
    """Returns the table with room for `width` stop ids a seat."""
    missing = width - sequences.stop_ids.shape[1]
    if missing <= 0:
        return sequences
    padding = ((0, 0), (0, missing))
    return replace(
        sequences, stop_ids=frozen(np.pad(sequences.stop_ids, padding, constant_values=-1))
    )


def _spread(
    seats: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs (seats[i], starts[i] + j) for all j < counts[i], as two arrays."""
    offsets = starts - np.cumsum(counts) + counts
    columns = np.arange(counts.sum(), dtype=np.int32) + np.repeat(offsets, counts)
    return np.repeat(seats, counts), columns.astype(np.int32)


def _with_type(sequences: Sequences, attention_type: str, **columns: Any) -> Sequences:
    changed: dict[str, Any] = {
        name: {**getattr(sequences, name), attention_type: value} for name, value in columns.items()
    }
    return replace(sequences, **changed)
