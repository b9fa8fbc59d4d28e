"""`pack`: from a plan to the arrays of one launch."""

import numpy as np
import pytest

from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.plan import Bucket, layout, pack
from cbfn.types import FULL, SLIDING, CacheSpec, Request, StepResult


def start(*prompts, layers=(FULL,), page=4, usable=20, window=4, **config):
    spec = CacheSpec(layers, page, 16, usable + 2, sliding_window=window, vocab_size=100)
    state = scheduler.init(spec, EngineConfig(**config))
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=9, temperature=0.5, top_k=number, seed=number - 1)
        state = scheduler.submit(state, Request(f"r{number}", prompt, params))
    return state


def commit(state, plan, *tokens):
    result = StepResult(np.array(tokens, np.int64)[:, None])
    return scheduler.commit(state, plan, result)[0]


def test_ragged_prefill_is_packed_row_by_row_with_padding_behind():
    _, plan = scheduler.schedule(start([5, 6, 7], [8, 9]))
    packed = pack(plan, Bucket(7, 3))
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert packed.carry_index.tolist() == [-1] * 7
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 5]
    assert packed.seq_lens.tolist() == [3, 2, 0]
    assert packed.logits_index.tolist() == [2, 4, 0]
    assert packed.sample_positions.tolist() == [3, 2, 0]
    table, slots = packed.block_table[FULL], packed.slot_mapping[FULL]
    a, b = (4 * table[:2, 0]).tolist()
    assert slots.tolist() == [a, a + 1, a + 2, b, b + 1, 4, 4]
    assert not table[:, 1:].any()
    assert not table[2].any()


def test_padding_writes_to_the_second_null_chunk_and_reads_the_first():
    state = start([1, 2, 3], layers=(FULL, SLIDING, SLIDING), usable=20)
    _, plan = scheduler.schedule(state)
    packed = pack(plan, Bucket(9, 4))
    for t in (FULL, SLIDING):
        size = plan.inputs.spec.chunk_tokens(t)
        assert set(packed.slot_mapping[t][3:]) == {size}  # the first line of chunk 1
        assert set(packed.slot_mapping[t][:3] // size).isdisjoint({0, 1})
        assert not packed.block_table[t][1:].any()


def test_decoding_tokens_come_from_the_host_once_they_are_committed():
    state, plan = scheduler.schedule(start([5, 6, 7], [8, 9]))
    state = commit(state, plan, 41, 0)
    state, plan = scheduler.schedule(state)
    packed = pack(plan, Bucket(2, 2))
    assert packed.input_ids.tolist() == [41, 0]
    assert packed.positions.tolist() == [3, 2]
    assert packed.carry_index.tolist() == [-1, -1]


def test_tokens_in_flight_are_carried_from_their_row_of_the_plan_before():
    state, first = scheduler.schedule(start([5, 6, 7], [8, 9]))
    state = scheduler.cancel(state, "r0")
    state, second = scheduler.schedule(state)
    packed = pack(second, Bucket(3, 2), previous=first)
    assert packed.input_ids.tolist() == [0, 0, 0]
    assert packed.carry_index.tolist() == [1, -1, -1]
    assert packed.positions.tolist()[0] == 2


def test_rows_of_one_token_come_first():
    state, plan = scheduler.schedule(start([5, 6, 7], [8], [1, 2], [9]))
    assert plan.num_tokens.tolist() == [1, 1, 3, 2]
    assert plan.request_ids == ("r1", "r3", "r0", "r2")
    state, plan = scheduler.schedule(commit(state, plan, 1, 3, 0, 2))
    assert pack(plan, Bucket(4, 4)).input_ids.tolist() == [
        {"r0": 0, "r1": 1, "r2": 2, "r3": 3}[request_id] for request_id in plan.request_ids
    ]


def test_last_chunk_of_a_prompt_samples_and_the_others_do_not():
    state = start([1, 2, 3, 4, 5], max_batch_tokens=2, max_requests_per_batch=1)
    plans = []
    for _ in range(3):
        state, plan = scheduler.schedule(state)
        state = commit(state, plan, 7)
        plans.append(plan)
    assert [plan.samples.tolist() for plan in plans] == [[False], [False], [True]]
    assert [pack(plan, Bucket(2, 1)).input_ids.tolist() for plan in plans] == [
        [1, 2],
        [3, 4],
        [5, 0],
    ]


def test_blocks_of_one_chunk_follow_each_other():
    state = start(list(range(10)), layers=(FULL, SLIDING, SLIDING, SLIDING), page=2, window=30)
    _, plan = scheduler.schedule(state)
    spec = plan.inputs.spec
    assert (spec.blocks_per_chunk(FULL), spec.blocks_per_chunk(SLIDING)) == (3, 1)
    packed = pack(plan, Bucket(10, 1))
    table = packed.block_table[FULL][0]
    assert (table[:3] - table[0]).tolist() == [0, 1, 2]
    assert table[0] % 3 == table[3] % 3 == 0
    assert (packed.slot_mapping[FULL] - 2 * table[0]).tolist()[:6] == [0, 1, 2, 3, 4, 5]


def test_sampling_parameters_stand_in_their_rows():
    _, plan = scheduler.schedule(start([5], [6], [7]))
    packed = pack(plan, Bucket(5, 5))
    assert packed.temperature.tolist() == [0.5, 0.5, 0.5, 0.0, 0.0]
    assert packed.top_k.tolist() == [0, 1, 2, 0, 0]
    assert packed.top_p.tolist() == [1.0] * 5
    assert packed.seeds.tolist() == [-1, 0, 1, 0, 0]


def test_seed_of_a_request_without_one_is_its_own_and_the_engines():
    def seeds(engine_seed):
        state = start(seed=engine_seed)
        for request_id in "ab":
            state = scheduler.submit(state, Request(request_id, [1]))
        _, plan = scheduler.schedule(state)
        return pack(plan, Bucket(2, 2)).seeds.tolist()

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


def test_pending_token_without_its_source_is_an_error():
    state, first = scheduler.schedule(start([5, 6], [8, 9]))
    _, second = scheduler.schedule(state)
    with pytest.raises(ValueError, match="expected the previous plan"):
        pack(second, Bucket(2, 2))
    without = scheduler.schedule(start([5, 6]))[1]
    with pytest.raises(ValueError, match=r"pending tokens of \['r1'\]"):
        pack(second, Bucket(2, 2), without)
    unfinished = scheduler.schedule(start([5, 6], [1, 2, 3], max_batch_tokens=4))[1]
    with pytest.raises(ValueError, match=r"pending tokens of \['r1'\]"):
        pack(second, Bucket(2, 2), unfinished)
    assert pack(second, Bucket(2, 2), first).carry_index.tolist() == [0, 1]
    state, _ = scheduler.schedule(start([5, 6], [8, 9], [7]))
    _, third = scheduler.schedule(state)
    with pytest.raises(ValueError, match=r"pending tokens of \['r2'\]"):
        pack(third, Bucket(3, 3), first)


def test_layout_of_a_bucket_is_made_once():
    spec = start().spec
    assert layout(Bucket(2, 2), spec) is layout(Bucket(2, 2), spec)


@pytest.mark.parametrize(("tokens", "rows"), [(3, 2), (4, 1)])
def test_plan_larger_than_its_bucket_is_an_error(tokens, rows):
    _, plan = scheduler.schedule(start([5, 6, 7], [8]))
    with pytest.raises(ValueError, match=rf"at most {tokens} tokens and {rows} rows, got 4 and 2"):
        pack(plan, Bucket(tokens, rows))


@pytest.mark.parametrize(("tokens", "rows"), [(0, 1), (1, 0), (1.5, 1)])
def test_bucket_has_a_token_and_a_row_at_least(tokens, rows):
    with pytest.raises(ValueError, match=r"Bucket\."):
        Bucket(tokens, rows)


def test_buckets_are_ordered_by_size():
    assert sorted([Bucket(8, 2), Bucket(2, 2), Bucket(8, 1)]) == [
        Bucket(2, 2),
        Bucket(8, 1),
        Bucket(8, 2),
    ]
