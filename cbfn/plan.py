"""From a plan to the arrays of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64

from cbfn import checks, sizing
from cbfn.pages import frozen
from cbfn.types import Plan

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
    belongs to no row. Both read the first null chunk and write the second.

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


def pack(plan: Plan, bucket: Bucket, previous: Plan | None = None) -> PackedBatch:
    """Returns the arrays that launch `plan` in the shape of `bucket`.

    `previous` is the plan launched just before, whose sampled tokens are still on the device.

    Raises ValueError for a plan larger than the bucket, or where a row's pending token is not in
    `previous`.
    """
    num_rows, num_tokens = len(plan), int(plan.num_tokens.sum())
    if num_rows > bucket.rows or num_tokens > bucket.tokens:
        raise ValueError(
            f"pack: expected a plan of at most {bucket.tokens} tokens and {bucket.rows} rows, "
            f"got {num_tokens} and {num_rows}"
        )
    s, seats = plan.inputs.sequences, plan.inputs.seats
    cu_seqlens = np.full(bucket.rows + 1, num_tokens, np.int32)
    cu_seqlens[0] = 0
    np.cumsum(plan.num_tokens, out=cu_seqlens[1 : num_rows + 1])
    ends = plan.starts + plan.num_tokens
    row_of = np.arange(num_rows)
    positions = np.zeros(bucket.tokens, np.int32)
    if num_tokens == num_rows:
        positions[:num_tokens] = plan.starts
    else:
        row_of = np.repeat(row_of, plan.num_tokens)
        first = plan.starts - cu_seqlens[:num_rows]
        positions[:num_tokens] = first[row_of] + np.arange(num_tokens, dtype=np.int32)
    block_table, slot_mapping = _addresses(plan, bucket, row_of, positions[:num_tokens])
    return PackedBatch(
        bucket=bucket,
        num_tokens=num_tokens,
        num_rows=num_rows,
        input_ids=frozen(_input_ids(plan, bucket, cu_seqlens)),
        positions=frozen(positions),
        carry_index=frozen(_carry_index(plan, bucket, previous, cu_seqlens)),
        cu_seqlens=frozen(cu_seqlens),
        seq_lens=_padded(ends, bucket.rows),
        logits_index=_padded(cu_seqlens[1 : num_rows + 1] - 1, bucket.rows),
        block_table=block_table,
        slot_mapping=slot_mapping,
        temperature=_padded(s.temperature[seats], bucket.rows),
        top_k=_padded(s.top_k[seats], bucket.rows),
        top_p=_padded(s.top_p[seats], bucket.rows, 1.0),
        min_p=_padded(s.min_p[seats], bucket.rows),
        seeds=_padded(s.seed[seats], bucket.rows),
        sample_positions=_padded(ends, bucket.rows),
    )


def _padded(values: np.ndarray, length: int, fill: float = 0) -> np.ndarray:
    padded = np.full(length, fill, values.dtype)
    padded[: len(values)] = values
    return frozen(padded)


def _input_ids(plan: Plan, bucket: Bucket, cu_seqlens: np.ndarray) -> np.ndarray:
    """Returns the tokens that the host knows, 0 for those that are pending."""
    s, seats = plan.inputs.sequences, plan.inputs.seats
    last = cu_seqlens[1 : len(plan) + 1] - 1
    input_ids = np.zeros(bucket.tokens, np.int32)
    ends = plan.starts + plan.num_tokens
    known = s.prompt_len[seats] + s.num_generated[seats]
    newest = (ends == known) & (s.num_generated[seats] > 0)
    input_ids[last[newest]] = s.last_token[seats[newest]]
    # all but decoding rows look their tokens up in the log
    for row in np.flatnonzero((plan.num_tokens > 1) | ~(newest | plan.pending)).tolist():
        first, start = cu_seqlens[row], int(plan.starts[row])
        tokens = s.log[seats[row]].tokens(start, min(int(ends[row]), int(known[row])))
        input_ids[first : first + len(tokens)] = tokens
    return input_ids


def _carry_index(
    plan: Plan, bucket: Bucket, previous: Plan | None, cu_seqlens: np.ndarray
) -> np.ndarray:
    """Returns, for each token that is pending, the previous plan's row that samples it."""
    carry_index = np.full(bucket.tokens, -1, np.int32)
    pending = np.flatnonzero(plan.pending)
    if not len(pending):
        return carry_index
    if previous is None:
        raise ValueError(f"pack: step {plan.step} has pending tokens, expected the previous plan")
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
    return carry_index


def _addresses(
    plan: Plan, bucket: Bucket, row_of: np.ndarray, positions: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns each type's block table and slot mapping."""
    spec, s, seats = plan.inputs
    page, width = spec.page_size, sizing.max_blocks(spec)
    page_of, offset = positions // page, positions % page
    block_table, slot_mapping = {}, {}
    for t in spec.attention_types:
        per_chunk = spec.blocks_per_chunk(t)
        chunks = s.tables[t].rows(seats, int(s.end[t][seats].max()))
        if per_chunk > 1:
            blocks = chunks[:, :, None] * per_chunk + np.arange(per_chunk, dtype=np.int32)
            chunks = blocks.reshape(len(seats), -1)[:, :width]
        table = np.zeros((bucket.rows, width), np.int32)
        table[: len(seats), : chunks.shape[1]] = chunks
        slots = np.full(bucket.tokens, per_chunk * page, np.int32)  # the second null chunk
        slots[: len(positions)] = table[row_of, page_of] * page + offset
        block_table[t], slot_mapping[t] = frozen(table), frozen(slots)
    return block_table, slot_mapping
