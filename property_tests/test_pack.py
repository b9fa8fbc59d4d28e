"""`pack` against a slow and obvious reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbfn.plan import Bucket, layout, pack
from cbfn.testing import strategies
from cbfn.types import Plan


def reference(plan: Plan, bucket: Bucket, previous: Plan | None) -> dict:
    """Returns the arrays as lists, row by row and token by token."""
    spec, s, seats = plan.inputs
    by_token = ("input_ids", "positions", "carry_index")
    by_row = ("temperature", "top_k", "top_p", "min_p", "seeds", "seq_lens", "logits_index")
    arrays = {name: [] for name in (*by_token, *by_row, "sample_positions")}
    arrays["cu_seqlens"] = [0]
    tables = {t: [] for t in spec.attention_types}
    slots = {t: [] for t in spec.attention_types}
    width = 0
    for row, seat in enumerate(seats.tolist()):
        request, log = s.request[seat], s.log[seat]
        known = [*request.prompt_token_ids, *log.generated[: s.num_generated[seat]]]
        blocks = {}
        for t in spec.attention_types:
            per_chunk = spec.blocks_per_chunk(t)
            held = s.tables[t].columns(np.array([seat]), int(s.end[t][seat]))[:, 0].tolist()
            blocks[t] = [chunk * per_chunk + i for chunk in held for i in range(per_chunk)]
            tables[t].append(blocks[t])
        start = int(plan.starts[row])
        for position in range(start, start + int(plan.num_tokens[row])):
            arrays["positions"].append(position)
            if position < len(known):
                arrays["input_ids"].append(known[position])
                arrays["carry_index"].append(-1)
            else:
                assert previous is not None
                arrays["input_ids"].append(0)
                arrays["carry_index"].append(
                    next(
                        i
                        for i in range(len(previous))
                        if previous.serials[i] == plan.serials[row]
                        and previous.epochs[i] == plan.epochs[row]
                    )
                )
            for t in spec.attention_types:
                block = blocks[t][position // spec.page_size]
                slots[t].append(block * spec.page_size + position % spec.page_size)
        end = len(arrays["positions"])
        arrays["cu_seqlens"].append(end)
        arrays["logits_index"].append(end - 1)
        arrays["seq_lens"].append(start + int(plan.num_tokens[row]))
        arrays["sample_positions"].append(arrays["seq_lens"][-1])
        params = request.sampling_params
        for name in ("temperature", "top_p", "min_p"):
            arrays[name].append(np.float32(getattr(params, name)))
        arrays["top_k"].append(max(params.top_k, 0))
        arrays["seeds"].append(int(s.seed[seat]))
        width = max(width, *(len(held) for held in blocks.values()))
    more_rows = bucket.rows - len(plan)
    more_tokens = bucket.tokens - len(arrays["positions"])
    arrays["cu_seqlens"] += [len(arrays["positions"])] * more_rows
    for name in ("input_ids", "positions"):
        arrays[name] += [0] * more_tokens
    arrays["carry_index"] += [-1] * more_tokens
    for name in ("seq_lens", "logits_index", "temperature", "top_k", "min_p", "seeds"):
        arrays[name] += [0] * more_rows
    arrays["sample_positions"] += [0] * more_rows
    arrays["top_p"] += [1.0] * more_rows
    for t in spec.attention_types:
        null_slot = spec.chunk_tokens(t)  # the first line of the second null chunk
        slots[t] += [null_slot] * more_tokens
        tables[t] += [[]] * more_rows
    return {**arrays, "block_table": tables, "slot_mapping": slots, "width": width}


@given(
    made=strategies.plans(max_steps=6),
    which=st.integers(0, 5),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_pack_equals_the_reference(made, which, more):
    at = which % len(made)
    plan, previous = made[at], made[at - 1] if at else None
    bucket = Bucket(int(plan.num_tokens.sum()) + more[0], len(plan) + more[1])
    packed, expected = pack(plan, bucket, previous), reference(plan, bucket, previous)
    assert (packed.num_tokens, packed.num_rows) == (int(plan.num_tokens.sum()), len(plan))
    where = layout(bucket, plan.inputs.spec)
    columns, types, rows = where.table_shape
    used = min(expected.pop("width"), columns) * types * rows
    assert packed.num_used == where.tables + used <= len(packed.buffer) == where.num_words
    for t, rows in expected.pop("block_table").items():
        table = packed.block_table[t]
        assert table.shape[0] == bucket.rows
        for row, blocks in enumerate(rows):
            width = min(len(blocks), table.shape[1])
            assert table[row, :width].tolist() == blocks[:width]
            assert (table[row, width:] < plan.inputs.spec.blocks_per_chunk(t)).all()  # null chunk
    for t, slots in expected.pop("slot_mapping").items():
        assert packed.slot_mapping[t].tolist() == slots
    for name, values in expected.items():
        assert getattr(packed, name).tolist() == values, name


@given(made=strategies.plans(max_steps=4))
def test_packed_arrays_are_read_only_and_of_the_buckets_shape(made):
    plan, previous = made[-1], made[-2] if len(made) > 1 else None
    bucket = Bucket(int(plan.num_tokens.sum()) + 2, len(plan) + 3)
    packed = pack(plan, bucket, previous)
    by_token = [packed.input_ids, packed.positions, packed.carry_index]
    by_row = [packed.seq_lens, packed.logits_index, packed.temperature, packed.top_k]
    by_row += [packed.top_p, packed.min_p, packed.seeds, packed.sample_positions]
    by_token += packed.slot_mapping.values()
    assert {array.shape for array in by_token} == {(bucket.tokens,)}
    assert {array.shape for array in by_row} == {(bucket.rows,)}
    assert packed.cu_seqlens.shape == (bucket.rows + 1,)
    for array in (*by_token, *by_row, packed.cu_seqlens, *packed.block_table.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@given(made=strategies.plans(max_steps=4))
def test_plan_that_is_larger_than_its_bucket_is_refused(made):
    plan, previous = made[-1], made[-2] if len(made) > 1 else None
    tokens, rows = int(plan.num_tokens.sum()), len(plan)
    for bucket in (Bucket(max(tokens - 1, 1), rows), Bucket(tokens, max(rows - 1, 1))):
        if bucket != Bucket(tokens, rows):
            with pytest.raises(ValueError, match=f"got {tokens} and {rows}"):
                pack(plan, bucket, previous)


@given(made=strategies.plans(max_steps=8))
def test_pending_token_needs_the_plan_before(made):
    for plan, wrong in zip(made, (None, None, *made), strict=False):
        if plan.pending.any():
            bucket = Bucket(int(plan.num_tokens.sum()), len(plan))
            with pytest.raises(ValueError, match="pending"):
                pack(plan, bucket, None)
            if wrong is not None and not set(wrong.serials) & set(plan.serials[plan.pending]):
                with pytest.raises(ValueError, match="pending"):
                    pack(plan, bucket, wrong)


@given(
    made=strategies.plans(max_steps=6),
    garbage=st.integers(-(2**31), 2**31 - 1),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_buffer_that_is_used_again_gives_the_same_arrays(made, garbage, more):
    buffer = np.full(10_000, garbage, np.int32)
    for plan, previous in zip(made, (None, *made), strict=False):
        bucket = Bucket(int(plan.num_tokens.sum()) + more[0], len(plan) + more[1])
        fresh, again = pack(plan, bucket, previous), pack(plan, bucket, previous, out=buffer)
        assert again.num_used == fresh.num_used
        used = slice(0, fresh.num_used)
        assert np.array_equal(again.buffer[used], fresh.buffer[used])
        assert np.shares_memory(again.input_ids, buffer)
        for name in ("input_ids", "cu_seqlens", "seq_lens", "seeds", "top_p", "temperature"):
            assert np.array_equal(getattr(again, name), getattr(fresh, name)), name
        for t in plan.inputs.spec.attention_types:
            assert np.array_equal(again.slot_mapping[t], fresh.slot_mapping[t])
            held = int(plan.inputs.sequences.end[t][plan.inputs.seats].max())
            for table in (again.block_table[t], fresh.block_table[t]):
                assert table.shape == fresh.block_table[t].shape
                assert not table[len(plan) :, : held * plan.inputs.spec.blocks_per_chunk(t)].any()
