"""The numbered cases that broke real engines, as far as the pure core can show them.

The oracle is every request run alone; `CheckedLoop` raises where a request gets other tokens than
that, where a KV line is read that is not the reader's own, or where any rule of the scheduler is
broken.
"""

import time

import numpy as np
import pytest

from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.plan import Bucket, pack
from cbfn.testing.loop import CheckedLoop
from cbfn.testing.oracles import run_alone
from cbfn.types import (
    FULL,
    SLIDING,
    CacheSpec,
    Request,
    RequestRejected,
    RequestStatus,
    StepResult,
    Tokens,
)

V = 97


def make_spec(usable=16, page=4, layers=(FULL,), window=None, **more):
    return CacheSpec(layers, page, 16, usable + 2, sliding_window=window, vocab_size=V, **more)


def make_loop(spec=None, **config):
    return CheckedLoop(spec or make_spec(), EngineConfig(**config))


def request(request_id, prompt, max_tokens=8, eos=(), **params):
    ids = [token % V for token in (range(prompt) if isinstance(prompt, int) else prompt)]
    params = SamplingParams(max_tokens=max_tokens, **params)
    return Request(request_id, ids, params, eos_token_ids=eos)


def ended(loop):
    """Returns the terminal outputs by request id."""
    return {f.request_id: f.terminal for f in loop.over}


def squeezed(num_requests=3, prompt=6, max_tokens=60, depth=1, usable=17, **config):
    """Returns a loop over requests that outgrow the cache together, and so preempt each other."""
    loop = make_loop(make_spec(usable=usable), safety_margin=0.0, **config)
    for number in range(num_requests):
        loop.submit(request(f"r{number}", range(number, number + prompt), max_tokens))
    loop.drain(depth)
    return loop


# Requests and admission


@pytest.mark.parametrize("prompt", [[], (), np.zeros(0, np.int64), Tokens([])])
def test_case_01_empty_prompt_is_rejected_alone(prompt):
    loop = make_loop()
    loop.submit(request("neighbour", 5))
    loop.turn()
    with pytest.raises(RequestRejected, match="at least one token id, got none"):
        Request("empty", prompt, SamplingParams())
    loop.drain()
    assert (
        ended(loop)["neighbour"].token_ids
        == run_alone([request("neighbour", 5)], loop.spec)["neighbour"].token_ids
    )


def test_case_02_prompt_larger_than_the_cache_is_refused_and_the_rest_finishes():
    loop = make_loop(make_spec(usable=4, page=4))
    loop.submit(request("small", 3))
    with pytest.raises(RequestRejected, match=r"'large'.* 17 tokens .*holds 16 .*4 chunks"):
        loop.functions.submit(loop.state, request("large", 17))
    assert not loop.submit(request("large", 17))
    assert loop.submit(request("just fits", 16))
    loop.submit(request("small too", 4))
    loop.drain()
    assert {o.finish_reason for o in ended(loop).values()} == {"length"}
    assert sorted(ended(loop)) == ["just fits", "small", "small too"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("layers", [(FULL,), (SLIDING,), (FULL, SLIDING, SLIDING)])
def test_case_03_request_that_outgrows_the_cache_ends_with_length(layers, depth):
    loop = make_loop(make_spec(usable=5, page=2, layers=layers, window=4), safety_margin=0.0)
    loop.submit(request("endless", 3, max_tokens=None))
    loop.drain(depth)
    output = ended(loop)["endless"]
    assert output.finish_reason == "length"
    assert len(output.token_ids) > 3
    loop.submit(request("next", 3, max_tokens=4))
    loop.drain(depth)
    assert len(ended(loop)["next"].token_ids) == 4


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", [0, 1])
def test_case_04_id_is_free_again_once_its_terminal_output_was_handed_out(turns, depth):
    loop = make_loop()
    loop.submit(request("a", 5))
    for _ in range(turns):
        loop.turn(depth)
    with pytest.raises(RequestRejected, match=r"'a'.*in use"):
        loop.functions.submit(loop.state, request("a", 3))
    loop.cancel("a")
    with pytest.raises(RequestRejected, match=r"'a'.*in use"):  # its output still waits
        loop.functions.submit(loop.state, request("a", 3))
    handed_out = loop.collect() if loop.launched else loop.flush()
    assert [o.finish_reason for o in handed_out] == ["cancelled"]
    assert loop.submit(request("a", 7, max_tokens=3))  # a stray row of the first may still run
    loop.drain(depth)
    first, second = (f.terminal for f in loop.over)
    assert (first.status, second.status) == (RequestStatus.CANCELLED, RequestStatus.FINISHED)
    assert len(second.token_ids) == 3
    assert not loop.cancel("a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("temperature", "top_p", "min_p")
        for value in (-1, 7.5, float("nan"), float("inf"))
        if (field, value) != ("temperature", 7.5)
    ],
)
def test_case_05_sampling_parameter_out_of_range_is_refused_in_the_caller(field, value):
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}: .*{value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("token", [-1, V, 2**31, 1.5])
def test_case_05_token_id_outside_the_vocabulary_is_refused_in_the_caller(token):
    state = scheduler.init(make_spec(), EngineConfig())
    with pytest.raises(RequestRejected, match=r"prompt_token_ids.*\D" + str(token).split(".")[0]):
        scheduler.submit(state, Request("a", [1, token], SamplingParams()))


@pytest.mark.parametrize("copies", [2, 32])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("layers", "window"), [((FULL,), None), ((SLIDING,), 5), ((FULL, SLIDING), 5)]
)
def test_case_06_prompt_of_exactly_k_pages_sent_many_times(copies, k, layers, window):
    loop = make_loop(make_spec(usable=250, layers=layers, window=window))
    loop.submit(request("first", 4 * k))
    loop.drain()
    for number in range(copies - 1):
        loop.submit(request(f"copy {number}", 4 * k))
    plan = loop.launch()
    assert (plan.num_tokens >= 1).all()
    loop.drain()
    outputs = ended(loop)
    assert len({tuple(o.token_ids) for o in outputs.values()}) == 1
    cached = {o.num_cached_tokens for i, o in outputs.items() if i != "first"}
    assert cached == {4 * (k - 1)}  # never the whole prompt: one token is always computed


@pytest.mark.parametrize("k", [1, 2, 3])
def test_case_06_prompt_of_exactly_k_pages_sent_32_times_at_once(k):
    loop = make_loop(make_spec(usable=200))
    for number in range(32):
        loop.submit(request(f"copy {number}", 4 * k))
    loop.drain(depth=1)
    assert len({tuple(o.token_ids) for o in ended(loop).values()}) == 1


# Asynchrony, preemption, cancel


@pytest.mark.parametrize("scheduler_name", ["fifo", "prefill_first"])
@pytest.mark.parametrize("budget", [4, 64])
def test_case_07_token_in_flight_of_a_preempted_request_is_delivered_once(scheduler_name, budget):
    loop = squeezed(scheduler=scheduler_name, max_batch_tokens=budget)
    assert loop.counts["preemption in flight"] > 0
    outputs = ended(loop)
    assert any(output.num_preemptions for output in outputs.values())
    assert {len(output.token_ids) for output in outputs.values()} == {60}
    for followed in loop.over:
        lengths = [len(tokens) for _, tokens in followed.outputs]
        assert lengths == list(range(1, 61))  # one more each time: none twice, none lost


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [3, 4, 7])
def test_case_08_resume_in_several_chunks_samples_only_from_the_last(depth, budget):
    loop = squeezed(depth=depth, max_batch_tokens=budget)
    assert loop.counts["resume in chunks"] > 0  # and the loop checks `samples` of each of them
    assert {len(output.token_ids) for output in ended(loop).values()} == {60}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 4, 5])
def test_case_09_exactly_max_tokens_with_two_launches_in_flight(max_tokens, prompt):
    loop = make_loop(make_spec(usable=64))
    for number in range(6):
        loop.submit(request(f"r{number}", prompt, max_tokens))
    rows = []
    while loop.live:
        while len(loop.launched) < 2 and (plan := loop.launch()) is not None:
            rows.append(len(plan))
        loop.collect()
    loop.check_at_rest()
    assert {len(o.token_ids) for o in ended(loop).values()} == {max_tokens}
    assert rows == [6] * max_tokens  # a request known to be over holds no row


@pytest.mark.parametrize("page", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("layers", "window"), [((FULL,), None), ((SLIDING,), 3), ((FULL, SLIDING, SLIDING), 6)]
)
def test_case_10_block_boundary_is_crossed_before_the_previous_token_is_seen(page, layers, window):
    loop = make_loop(make_spec(usable=300, page=page, layers=layers, window=window))
    for prompt in range(1, 10):
        loop.submit(request(f"r{prompt}", range(prompt, 2 * prompt), 11))
    loop.drain(depth=1)
    assert loop.counts["carry"] >= 10
    assert {len(o.token_ids) for o in ended(loop).values()} == {11}


MOMENTS = ("queued", "mid-prefill", "decoding", "in flight", "last step", "finished", "preempted")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_case_11_cancel_at_every_moment_gives_one_terminal_output(moment, depth):
    loop = make_loop(
        make_spec(usable=9), max_batch_tokens=4, max_requests_per_batch=3, safety_margin=0.0
    )
    others = ["b", "c"]
    first = [request("a", 10, 12)]
    rest = [request(other, [5, 6, 7], 20) for other in others]
    if moment == "preempted":  # the newest is
        first, rest = rest, [request("a", 3, 20)]
    for each in (*first, *rest):
        loop.submit(each)
    a = loop.live["a"]

    def reached():
        return {
            "queued": True,
            "mid-prefill": 0 < a.computed < 10,
            "decoding": a.given >= 2,
            "in flight": a.given >= 2 and a.in_flight,
            "last step": a.num_tokens == a.expected.limit,
            "finished": a.terminal is not None,
            "preempted": any(e.request.request_id == "a" and e.epoch for e in entries()),
        }[moment]

    def entries():
        return loop.state.entries.values()

    for _ in range(200):
        if reached():
            break
        loop.turn(depth)
        if moment in ("in flight", "last step") and not reached() and len(loop.launched) < 2:
            loop.launch()
    assert reached(), moment
    assert loop.cancel("a") == (moment != "finished")
    assert not loop.cancel("a")
    assert not loop.cancel("unknown")
    loop.drain(depth)
    assert [f.request_id for f in loop.over].count("a") == 1
    assert {len(ended(loop)[other].token_ids) for other in others} == {20}


@pytest.mark.parametrize("depth", [0, 1])
def test_case_11_cancel_of_all_active_while_others_are_preempted(depth):
    loop = make_loop(make_spec(usable=17), safety_margin=0.0)
    for number in range(4):
        loop.submit(request(f"r{number}", range(number, number + 6), 50))
    while not any(entry.epoch for entry in loop.state.entries.values()):
        loop.turn(depth)
    active = list(loop.state.seats)
    waiting = [e.request.request_id for e in loop.state.entries.values()]
    for request_id in active:
        assert loop.cancel(request_id)
    assert loop.state.cache.pool.num_owned == 0
    loop.drain(depth)
    assert {ended(loop)[i].finish_reason for i in active} == {"cancelled"}
    assert {len(ended(loop)[i].token_ids) for i in waiting} == {50}


def test_case_13_outputs_kept_by_the_caller_never_change():
    loop = squeezed()
    assert loop.counts["preemption"] > 0
    for followed in loop.over:
        for length, (output, tokens) in enumerate(followed.outputs, 1):
            assert output.token_ids == tokens == followed.expected.token_ids[:length]
            assert len(output.token_ids) == length


# Cache


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_case_17_eviction_spares_what_the_same_admission_reuses(spare):
    loop = make_loop(make_spec(usable=6 + spare), safety_margin=0.0)
    loop.submit(request("old", range(50, 58), 1))  # two blocks, used last before the prefix
    loop.drain()
    loop.submit(request("prefix", 8, 1))
    loop.drain()
    loop.submit(request("touch", range(50, 58), 1))  # now the prefix is the least recently used
    loop.drain()
    # takes the prefix's blocks and needs all that is free, and some that is cached
    tail = [*range(8), *range(60, 60 + 12 + 4 * spare)]
    loop.submit(request("reuses", tail, 1))
    plan = loop.launch()
    assert plan.starts.tolist() == [8]
    loop.drain()
    assert ended(loop)["reuses"].num_cached_tokens == 8


WINDOW = 6


@pytest.mark.parametrize("budget", [WINDOW - 3, WINDOW, WINDOW + 2, 64])
@pytest.mark.parametrize("page", [2, 4])
@pytest.mark.parametrize("layers", [(SLIDING,), (FULL, SLIDING), (SLIDING, SLIDING, FULL)])
@pytest.mark.parametrize("depth", [0, 1])
def test_case_18_sliding_window(budget, page, layers, depth):
    spec = make_spec(usable=400, page=page, layers=layers, window=WINDOW)
    loop = make_loop(spec, max_batch_tokens=budget)
    prompts = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)
    for turn in ("first", "later"):  # the later ones find what the first have computed
        for prompt in prompts:
            tokens = range(prompt, 2 * prompt)
            loop.submit(request(f"{prompt}, {turn}", tokens, 2 * WINDOW))
            loop.submit(request(f"{prompt} and one, {turn}", [*tokens, 90], 2 * WINDOW))
        loop.drain(depth)
    assert {len(o.token_ids) for o in ended(loop).values()} == {2 * WINDOW}
    assert loop.counts["window release"] > 0
    assert loop.counts["prefix hit"] > 0


def test_case_18_window_bounds_what_a_request_holds():
    loop = make_loop(make_spec(usable=8, page=2, layers=(SLIDING,), window=WINDOW))
    loop.submit(request("long", 4, 80))
    most = 0
    while loop.live:
        loop.turn(1)
        most = max(most, loop.state.cache.pool.num_owned)
    assert len(ended(loop)["long"].token_ids) == 13  # as many lines as the cache has
    assert most <= 5


# Service


@pytest.mark.parametrize("scheduler_name", ["fifo", "prefill_first"])
@pytest.mark.parametrize("depth", [0, 1])
def test_case_22_large_prompt_among_endless_small_ones_waits_a_bounded_time(scheduler_name, depth):
    loop = make_loop(
        make_spec(usable=20),
        scheduler=scheduler_name,
        max_batch_tokens=8,
        max_requests_per_batch=4,
    )
    for number in range(8):
        loop.submit(request(f"early {number}", [number, 1], 4))
    loop.submit(request("large", 60, 6))
    count = 0
    while "large" in loop.live:
        loop.submit(request(f"late {count}", [count % 50, 2], 4))
        count += 1
        loop.turn(depth)
        assert count < 120
    assert len(ended(loop)["large"].token_ids) == 6


def test_case_22_queue_of_ten_thousand_does_not_change_the_time_of_a_step():
    def step_time(waiting):
        config = EngineConfig(max_requests_per_batch=8)
        state = scheduler.init(make_spec(usable=400), config)
        for number in range(8 + waiting):
            state = scheduler.submit(state, request(str(number), 4, 150))
        times = []
        for _ in range(100):
            begin = time.perf_counter()
            state, plan = scheduler.schedule(state)
            tokens = np.zeros((len(plan), 1), np.int32)
            state, outputs = scheduler.commit(state, plan, StepResult(tokens))
            list(outputs)
            times.append(time.perf_counter() - begin)
        assert len(state.queue) == waiting
        return min(times)

    short, long = step_time(10), step_time(10_000)
    assert long < 2 * short


@pytest.mark.parametrize("depth", [0, 1])
def test_case_23_noise_depends_on_the_seed_and_the_position_alone(depth):
    """Every sampled token is drawn for its own (seed, position), whatever the batch."""
    watched = request("seeded", 6, 60, seed=1234, temperature=1.0)

    def draws(others, **config):
        loop = make_loop(make_spec(usable=17), safety_margin=0.0, **config)
        for other in others:
            loop.submit(other)
        loop.submit(watched)
        seen = {}
        while "seeded" in loop.live:
            previous = loop.last.plan if loop.last else None
            plan = loop.launch() if len(loop.launched) < 2 else None
            if plan is not None and "seeded" in plan.request_ids:
                row = plan.request_ids.index("seeded")
                packed = pack(plan, Bucket(int(plan.num_tokens.sum()), len(plan)), previous)
                if plan.samples[row]:
                    position = int(packed.sample_positions[row])
                    assert position not in seen  # nothing is sampled twice
                    seen[position] = int(packed.seeds[row])
                assert packed.temperature[row] == 1.0
            if len(loop.launched) > (depth if plan is not None else 0):
                loop.collect()
        return seen, ended(loop)["seeded"].num_preemptions

    alone, preempted = draws([])
    assert alone == dict.fromkeys(range(6, 66), 1234)
    assert not preempted
    greedy = [request(f"r{n}", range(n, n + 6), 60, temperature=0.0) for n in range(2)]
    among, preempted = draws(greedy)
    assert preempted
    assert among == alone
    assert draws(greedy, max_batch_tokens=5)[0] == alone


def test_case_23_temperatures_of_a_batch_reach_their_own_rows():
    loop = make_loop()
    temperatures = {"greedy": 0.0, "almost": 1e-4, "plain": 1.0}
    for request_id, temperature in temperatures.items():
        loop.submit(request(request_id, 3, temperature=temperature, seed=len(request_id)))
    plan = loop.launch()
    packed = pack(plan, Bucket(16, 8))
    for row, request_id in enumerate(plan.request_ids):
        assert packed.temperature[row] == np.float32(temperatures[request_id])
        assert packed.seeds[row] == len(request_id)
    loop.drain()
