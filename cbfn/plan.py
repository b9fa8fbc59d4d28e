"""From a plan to the arrays of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Int32, Int64

from cbfn import checks, sizing
from cbfn.pages import frozen
from cbfn.types import CacheSpec, Plan

__all__ = ["Bucket", "PackedBatch", "Plan", "pack"]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A batch shape: how many tokens and rows a launch has, padding included.

    Raises ValueError unless both are at least 1.
    """

    tokens: int
    rows: int

    def __post_init__(self) -> None:
        checks.integer("Bucket.tokens", self.tokens, 1)
        checks.integer("Bucket.rows", self.rows, 1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The read-only arrays of one launch: the plan's rows and tokens first, then padding.

    A padding row has no tokens (`cu_seqlens` repeats the end) and `seq_lens` 0; a padding token
    belongs to no row. Both read the first null chunk and write the second. All arrays are views of
    one `buffer`, laid out by `Layout`, so that one copy brings them to a device.

    Arguments:
        input_ids: token ids; 0 where `carry_index` >= 0 and in padding.
        positions: each token's position in its request.
        carry_index: row of the previous plan whose sampled token is the input, or -1.
        cu_seqlens: row i has tokens `cu_seqlens[i]` to `cu_seqlens[i + 1] - 1`.
        seq_lens: tokens of each row's request whose KV is there once this step has run.
        logits_index: each row's last token, whose logits are sampled from.
        block_table: by attention type, the blocks of each row in order, 0 where none is held.
        slot_mapping: by attention type, block * page_size + offset that each token is written to.
        temperature, top_k, top_p, min_p, seeds: each row's sampling; padding rows are greedy.
        sample_positions: the position that each row samples a token for.
        buffer: all of the above; only its first `num_used` words matter to this batch.
    """

    bucket: Bucket
    num_tokens: int
    num_rows: int
    input_ids: Int32[np.ndarray, "T"]
    positions: Int32[np.ndarray, "T"]
    carry_index: Int32[np.ndarray, "T"]
    cu_seqlens: Int32[np.ndarray, "B1"]
    seq_lens: Int32[np.ndarray, "B"]
    logits_index: Int32[np.ndarray, "B"]
    block_table: Mapping[str, Int32[np.ndarray, "B M"]]
    slot_mapping: Mapping[str, Int32[np.ndarray, "T"]]
    temperature: Float32[np.ndarray, "B"]
    top_k: Int32[np.ndarray, "B"]
    top_p: Float32[np.ndarray, "B"]
    min_p: Float32[np.ndarray, "B"]
    seeds: Int64[np.ndarray, "B"]
    sample_positions: Int32[np.ndarray, "B"]
    buffer: Int32[np.ndarray, "words"]
    num_used: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the arrays of a bucket lie in one buffer of 32-bit words.

    Every array starts at a multiple of four words, which device code may rely on. The block tables
    come last and column by column, so that what a batch uses of them is a prefix.

    Arguments:
        places: (offset, words) of each array, the slot mappings by attention type.
        tables: offset of the block tables, whose shape is [M, attention types, B].
        num_words: words of the whole buffer.
    """

    places: Mapping[str, tuple[int, int]]
    tables: int
    table_shape: tuple[int, int, int]
    num_words: int

    def table_words(self, num_columns: int) -> int:
        """Returns the words of the whole buffer up to that many columns of the tables."""
        return self.tables + num_columns * self.table_shape[1] * self.table_shape[2]


DTYPES = {"temperature": "float32", "top_p": "float32", "min_p": "float32", "seeds": "int64"}


@lru_cache(maxsize=512)
def layout(bucket: Bucket, spec: CacheSpec) -> Layout:
    """Returns the layout of a bucket's arrays; the dtype of each is `DTYPES`' or int32."""
    sizes = {"seeds": 2 * bucket.rows, "cu_seqlens": bucket.rows + 1}
    rows = [
        "seq_lens",
        "logits_index",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "sample_positions",
    ]
    sizes |= dict.fromkeys(rows, bucket.rows)
    mappings = [f"slot_mapping.{t}" for t in spec.attention_types]
    tokens = ["input_ids", "positions", "carry_index", *mappings]
    sizes |= dict.fromkeys(tokens, bucket.tokens)
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = (offset, size)
        offset += sizing.ceil_div(size, 4) * 4
    shape = (sizing.max_blocks(spec), len(spec.attention_types), bucket.rows)
    return Layout(places, offset, shape, offset + shape[0] * shape[1] * shape[2])


def pack(
    plan: Plan,
    bucket: Bucket,
    previous: Plan | None = None,
    out: Int32[np.ndarray, "words"] | None = None,
) -> PackedBatch:
    """Returns the arrays that launch `plan` in the shape of `bucket`.

    `previous` is the plan launched just before, whose sampled tokens are still on the device. With
    `out`, the arrays are views of its first words, which are written; what they hold behind
    `num_used` is then left as it was.

    Raises ValueError for a plan larger than the bucket, or where a row's pending token is not in
    `previous`.
    """
    num_rows, num_tokens = len(plan), int(plan.num_tokens.sum())
    if num_rows > bucket.rows or num_tokens > bucket.tokens:
        raise ValueError(
            f"pack: expected a plan of at most {bucket.tokens} tokens and {bucket.rows} rows, "
            f"got {num_tokens} and {num_rows}"
        )
    spec, s, seats = plan.inputs
    where = layout(bucket, spec)
    buffer = np.zeros(where.num_words, np.int32) if out is None else out[: where.num_words]
    arrays = {
        name: buffer[start : start + size].view(DTYPES.get(name, "int32"))
        for name, (start, size) in where.places.items()
    }
    if out is not None:
        buffer[: where.tables] = 0
    cu_seqlens, ends = arrays["cu_seqlens"], plan.starts + plan.num_tokens
    np.cumsum(plan.num_tokens, out=cu_seqlens[1 : num_rows + 1])
    cu_seqlens[num_rows + 1 :] = num_tokens
    row_of = np.arange(num_rows)
    positions = arrays["positions"][:num_tokens]
    if num_tokens == num_rows:
        positions[:] = plan.starts
    else:
        row_of = np.repeat(row_of, plan.num_tokens)
        first = plan.starts - cu_seqlens[:num_rows]
        np.add(first[row_of], np.arange(num_tokens, dtype=np.int32), out=positions)
    _fill_input_ids(plan, arrays["input_ids"], cu_seqlens)
    _fill_carry_index(plan, previous, arrays["carry_index"], cu_seqlens)
    tables = buffer[where.tables :].reshape(where.table_shape)
    used = _fill_tables(plan, tables)
    for at, t in enumerate(spec.attention_types):
        slots = arrays[f"slot_mapping.{t}"]
        block = tables[positions // spec.page_size, at, row_of]
        np.add(block * spec.page_size, positions % spec.page_size, out=slots[:num_tokens])
        slots[num_tokens:] = spec.chunk_tokens(t)  # the first line of the second null chunk
    for name in ("temperature", "top_k", "top_p", "min_p"):
        arrays[name][:num_rows] = getattr(s, name)[seats]
    arrays["top_p"][num_rows:] = 1.0
    arrays["seeds"][:num_rows] = s.seed[seats]
    arrays["seq_lens"][:num_rows] = ends
    arrays["sample_positions"][:num_rows] = ends
    arrays["logits_index"][:num_rows] = cu_seqlens[1 : num_rows + 1] - 1
    for array in (*arrays.values(), tables, buffer):
        frozen(array)
    types = dict(enumerate(spec.attention_types))
    return PackedBatch(
        bucket=bucket,
        num_tokens=num_tokens,
        num_rows=num_rows,
        block_table={t: tables[:, at].T for at, t in types.items()},
        slot_mapping={t: arrays.pop(f"slot_mapping.{t}") for t in types.values()},
        buffer=buffer,
        num_used=where.table_words(used),
        **arrays,
    )


def _fill_input_ids(plan: Plan, input_ids: np.ndarray, cu_seqlens: np.ndarray) -> None:
    """Enters the tokens that the host knows; those that are pending stay 0."""
    s, seats = plan.inputs.sequences, plan.inputs.seats
    last = cu_seqlens[1 : len(plan) + 1] - 1
    ends = plan.starts + plan.num_tokens
    known = s.prompt_len[seats] + s.num_generated[seats]
    newest = (ends == known) & (s.num_generated[seats] > 0)
    input_ids[last[newest]] = s.last_token[seats[newest]]
    # all but decoding rows look their tokens up in the log
    for row in np.flatnonzero((plan.num_tokens > 1) | ~(newest | plan.pending)).tolist():
        first, start = cu_seqlens[row], int(plan.starts[row])
        tokens = s.log[seats[row]].tokens(start, min(int(ends[row]), int(known[row])))
        input_ids[first : first + len(tokens)] = tokens


def _fill_carry_index(
    plan: Plan, previous: Plan | None, carry_index: np.ndarray, cu_seqlens: np.ndarray
) -> None:
    """Enters, for each token that is pending, the previous plan's row that samples it."""
    carry_index[:] = -1
    pending = np.flatnonzero(plan.pending)
    if not len(pending):
        return
    if previous is None:
        raise ValueError(
            f"pack: step {plan.step} has pending tokens, expected the previous plan, got None; "
            "pass previous=... of the launch before"
        )
    if np.array_equal(plan.serials, previous.serials):
        source = pending
    else:
        order = np.argsort(previous.serials)
        place = np.searchsorted(previous.serials, plan.serials[pending], sorter=order)
        source = order[np.minimum(place, len(order) - 1)]
    found = (previous.serials[source] == plan.serials[pending]) & previous.samples[source]
    found &= previous.epochs[source] == plan.epochs[pending]
    if not found.all():
        lost = [plan.request_ids[row] for row in pending[~found].tolist()]
        raise ValueError(
            f"pack: expected pending tokens of {lost} in the previous plan (step {previous.step})"
        )
    carry_index[cu_seqlens[pending + 1] - 1] = source


def _fill_tables(plan: Plan, tables: Int32[np.ndarray, "M types B"]) -> int:
    """Enters each row's blocks of each type, and returns how many columns are used."""
    spec, s, seats = plan.inputs
    blocks = []
    for t in spec.attention_types:
        per_chunk = spec.blocks_per_chunk(t)
        chunks = s.tables[t].columns(seats, int(s.end[t][seats].max()))
        if per_chunk > 1:
            parts = chunks[:, None] * per_chunk + np.arange(per_chunk, dtype=np.int32)[:, None]
            chunks = parts.reshape(-1, len(seats))[: len(tables)]
        blocks.append(chunks)
    used = max(map(len, blocks))
    for at, chunks in enumerate(blocks):
        tables[: len(chunks), at, : len(seats)] = chunks
        tables[len(chunks) : used, at] = 0  # a buffer that is used again has older blocks there
    tables[:used, :, len(seats) :] = 0
    return used
