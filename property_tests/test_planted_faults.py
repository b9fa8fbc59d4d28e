"""Whatever is wrong with the core is found: one planted fault for each rule, and for each case that
broke a real engine.

A fault changes a line or two of one function, as a slip of the pen would; the machine that is meant
for it has to find it, in the quick and repeatable search of `verdict`, and for the right reason:
the error names the rule that was broken.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from cbfn import (
    committing,
    ending,
    offload,
    pages,
    plan,
    policies,
    prefix,
    prompts,
    scheduler,
    scheduling,
    sequence,
)
from cbfn.policies import fifo
from cbfn.scheduling import _Draft
from cbfn.sequence import TokenLog
from cbfn.state import BatchState, _WaitingIds
from cbfn.streams import TwoSlots
from cbfn.testing import strategies
from cbfn.testing.machines import (
    CarryOverMachine,
    PagePoolMachine,
    PipelineMachine,
    PrefixCacheMachine,
    SchedulerMachine,
    StreamsMachine,
)
from property_tests.faults import Edit, planted
from property_tests.verdict import verdict
from property_tests.worlds import OFFLOADING


class Fault(NamedTuple):
    """A fault; the machine that finds it; and how its error may begin."""

    name: str
    machine: type[Any]
    edits: tuple[Edit, ...]
    rules: tuple[str, ...]
    world: Mapping[str, Any]


def fault(name, machine, *edits, rule, world=MappingProxyType({})):
    """Returns a fault; each edit is (function, old text, new text).

    `world` has what the machine is tried with, where a fault shows in a few cases only.
    """
    rules = (rule,) if isinstance(rule, str) else rule
    return Fault(name, machine, tuple(Edit(*edit) for edit in edits), rules, world)


def offers_all_twice(self, config):
    return lambda state: [*fifo(state), *fifo(state)]


def offers_all_seats(self, config):
    return lambda state: [*state.seats, *state.waiting]


HYBRID = {"specs": strategies.cache_specs(kinds=("hybrid",))}
WINDOW = {"specs": strategies.cache_specs(kinds=("sliding", "hybrid"))}
SMALL_CHUNKS = {"specs": strategies.cache_specs(max_page_size=2, max_layers=1)}
CROWDED = {
    **SMALL_CHUNKS,
    "configs": strategies.engine_configs(safety_margins=(0.0,)).map(
        lambda config: replace(config, max_batch_tokens=24, max_requests_per_batch=6)
    ),
}
CAREFUL = {"configs": strategies.engine_configs(safety_margins=(0.3,))}
SMALL_STEPS = {"configs": strategies.engine_configs(max_batch_tokens=4)}
PREFILL_FIRST = {
    "configs": strategies.engine_configs(schedulers=("prefill_first",), max_batch_tokens=8)
}


PAGES = [
    fault(
        "a chunk is freed twice",
        PagePoolMachine,
        (pages.release, "if (owners[chunks] < 0).any():", "if False:"),
        rule="pages: release took ",
    ),
    fault(
        "a shared chunk is freed by the first who lets go",
        PagePoolMachine,
        (pages.release, "idle = chunks[owners[chunks] == 0]", "idle = chunks"),
        rule="pages: ",
    ),
    fault(
        "two owners let go in one call and count once",
        PagePoolMachine,
        (pages.release, "np.subtract.at(owners, chunks, 1)", "owners[chunks] -= 1"),
        rule="pages: ",
    ),
    fault(
        "a null chunk is handed out",
        PagePoolMachine,
        (pages.init, "NUM_NULL_CHUNKS - 1, -1, dtype", "NUM_NULL_CHUNKS - 2, -1, dtype"),
        rule="pages: the free stack ",
    ),
    fault(
        "an allocation that is too large takes what is there",
        PagePoolMachine,
        (pages.allocate, "if left < 0:", "if total > len(pool.owners):"),
        rule="pages: [",
    ),
    fault(
        "two parts of an allocation get the same chunks",
        PagePoolMachine,
        (pages.allocate, "start += count", "start = 0"),
        rule="pages: ",
    ),
    fault(
        "which chunks are handed out depends on chance",
        PagePoolMachine,
        (
            pages.allocate,
            "pool.free[left:][::-1]",
            "np.random.permutation(pool.free[left:].copy())",
        ),
        rule="pages: the same call",
    ),
    fault(
        "a cached chunk that is used again still counts as cached",
        PagePoolMachine,
        (pages.share, "num_cached=pool.num_cached - woken", "num_cached=pool.num_cached"),
        rule="pages: ",
    ),
    fault(
        "a chunk in use is evicted",
        PagePoolMachine,
        (pages.evict, "(pool.owners[chunks] != 0).any() or ", ""),
        rule="pages: evict took ",
    ),
    fault(
        "an old pool is changed in place",
        PagePoolMachine,
        (
            pages.share,
            "owners = pool.owners.copy()",
            "owners = pool.owners; owners.flags.writeable = True",
        ),
        rule="old states: ",
    ),
]

PREFIX = [
    fault(
        "the most recently used chunk is evicted first",
        PrefixCacheMachine,
        (
            prefix._evict,
            "np.argsort(cache.last_used[chunks]",
            "np.argsort(-cache.last_used[chunks]",
        ),
        rule="prefix: ",
    ),
    fault(
        "a chunk is evicted by its place in the queue from before it was used again",
        PrefixCacheMachine,
        (prefix._valid, "unused & (cache.last_used[chunks] == stamps)", "unused"),
        rule="prefix: ",
    ),
    fault(
        "a referenced chunk is evicted",
        PrefixCacheMachine,
        (
            prefix._evict,
            "cache.pool.published & (cache.pool.owners == 0)",
            "cache.pool.published",
        ),
        rule="pages: only cached chunks are evicted",
    ),
    fault(
        "a key has eight bits",
        PrefixCacheMachine,
        (prefix.next_digest, "digest_size=DIGEST_BYTES", "digest_size=1"),
        rule="prefix: ",
    ),
    fault(
        "a key names a block without what is before it",
        SchedulerMachine,
        (prefix.next_digest, "parent + block_tokens.tobytes()", "block_tokens.tobytes()"),
        rule=("reads: ", "weights: ", "pages: "),
        world=SMALL_CHUNKS,
    ),
    fault(
        "a second chunk takes over a known key",
        PrefixCacheMachine,
        (
            prefix.publish,
            "if key not in chunk_of and chunk not in key_of:",
            "if chunk not in key_of:",
        ),
        rule="prefix: ",
    ),
    fault(
        "all tokens of a prompt come from the cache",  # case 6
        PrefixCacheMachine,
        (prefix.match, "(num_tokens - 1) // unit", "num_tokens // unit"),
        rule="prefix: tokens of a hit",
    ),
    fault(
        "the last token of a cached prompt is computed again, into the shared chunk",  # case 6
        SchedulerMachine,
        (prefix.match, "(num_tokens - 1) // unit", "num_tokens // unit"),
        (prefix.match, "num_tokens=length,", "num_tokens=min(length, num_tokens - 1),"),
        rule=("shared: ", "writes: "),
        world=SMALL_CHUNKS,
    ),
    fault(
        "a hit lacks the first chunk that its window still sees",  # case 18
        PrefixCacheMachine,
        (prefix.first_visible, "spec.sliding_window + 1", "spec.sliding_window + 2"),
        rule="prefix: ",
        world=WINDOW,
    ),
    fault(
        "new weights, and what the old ones computed is still known",
        SchedulerMachine,
        (scheduler.weights_updated, "cache=cache, ", ""),
        rule="weights: ",
        world=SMALL_CHUNKS,
    ),
    fault(
        "what the old weights computed is published under the new ones",
        SchedulerMachine,
        (committing._publish, "rows = rows[s.weights[seats[rows]] == state.weight_version]", ""),
        rule="published: ",
        world=SMALL_CHUNKS,
    ),
    fault(
        "a block is published that is not full",
        SchedulerMachine,
        (
            committing._publish,
            "np.arange(first[row], ends[row] // size, dtype",
            "np.arange(first[row], -(-ends[row] // size), dtype",
        ),
        rule="published: ",
    ),
    fault(
        "a block is published that is planned and not computed",
        PipelineMachine,
        (
            committing._publish,
            "ends = plan.starts + plan.num_tokens",
            "ends = s.num_computed[seats]",
        ),
        rule="published: ",
    ),
    fault(
        "what a failed step computed is published",
        PipelineMachine,
        (
            committing.commit,
            "if tokens is None:",
            "if tokens is None:\n        state = _publish(state, plan, rows)",
        ),
        rule="reads: ",
        world=SMALL_CHUNKS,
    ),
    fault(
        "a hit is claimed after the same admission has evicted for its other chunks",  # case 17
        SchedulerMachine,
        (_Draft._admit, "self.cache = prefix.claim(self.cache, hit)", "pass"),
        (
            scheduling._build,
            "sequences, cache, seats, ends)",
            "sequences, cache, seats, ends)\n"
            "    for admission in draft.admitted: cache = prefix.claim(cache, admission.hit)",
        ),
        rule=("writes: ", "shared: ", "reads: ", "pages: "),
    ),
    fault(
        "an admission that is put off keeps the hit that it claimed",
        SchedulerMachine,
        (_Draft._admit, "self.cache = prefix.claim(self.cache, hit)", "pass"),
        (
            _Draft._admit,
            "idle = prefix.num_idle(self.cache, hit)",
            "idle = prefix.num_idle(self.cache, hit); self.cache = prefix.claim(self.cache, hit)",
        ),
        rule=("owners: ", "the draft took "),
    ),
]

ADMISSION = [
    fault(
        "a prompt without tokens is taken",  # case 1
        SchedulerMachine,
        (prompts.token_ids, "if not len(ids):", "if False:"),
        (prompts.token_ids, "ids.min() < 0 or ids.max() > MAX_TOKEN_ID", "(ids < 0).any()"),
        (
            scheduler._check_prompt,
            "prompt.max() >= spec.vocab_size",
            "(prompt >= spec.vocab_size).any()",
        ),
        rule="submit: ",
    ),
    fault(
        "a row without tokens is planned, and would sample from its neighbour's",  # case 1
        PipelineMachine,
        (
            _Draft.fill,
            "todo_of[seat]\n        if not count:",
            "todo_of[seat]\n        if count < 0:",
        ),
        rule="plan: ",
        world={"make_policy": offers_all_seats},
    ),
    fault(
        "a prompt that is one token too long for the cache is taken",  # case 2
        SchedulerMachine,
        (scheduler._check_prompt, "len(prompt) > longest", "len(prompt) > longest + 1"),
        rule="submit: ",
    ),
    fault(
        "a request may grow one token beyond the cache",  # case 3
        SchedulerMachine,
        (scheduler.submit, "limit = min(longest + 1,", "limit = min(longest + 2,"),
        rule=("limit: ", "progress: ", "end: "),
    ),
    fault(
        "the id of a waiting request is taken once more",  # case 4
        SchedulerMachine,
        (scheduler.submit, "request.request_id in state.ids", "request.request_id in state.seats"),
        rule="submit: ",
    ),
    fault(
        "a row in flight delivers its token to a new request of the same id",  # case 4
        PipelineMachine,
        (
            committing.commit,
            "(s.serial[seats] == plan.serials) & (s.epoch[seats] == plan.epochs)",
            "s.request_id[seats] == np.array(plan.request_ids, object)",
        ),
        rule=("outputs: ", "tokens: ", "published: ", "pages: only owned chunks are published"),
    ),
    fault(
        "a token id behind the vocabulary is taken",  # case 5
        SchedulerMachine,
        (scheduler._check_prompt, "prompt.max() >= spec", "prompt.max() > spec"),
        rule="submit: ",
    ),
    fault(
        "a negative token id is taken",  # case 5
        SchedulerMachine,
        (prompts.token_ids, "ids.min() < 0 or ids", "ids"),
        rule="submit: ",
    ),
    fault(
        "requests that were preempted stand behind all that wait",
        SchedulerMachine,
        (
            _WaitingIds.__iter__,
            "in self._queue:",
            "in sorted(self._queue, key=lambda n: self._entries[n].epoch):",
        ),
        rule="order: ",
    ),
    fault(
        "an admission leaves no margin",
        SchedulerMachine,
        (_Draft._admit, "whole + idle + margin >", "whole + idle >"),
        rule="margin: ",
        world=CAREFUL,
    ),
    fault(
        "cached chunks of a hit count as free for others",
        SchedulerMachine,
        (_Draft._admit, "self.chunks_left -= idle", "pass"),
        rule="the draft took no more than there is",
    ),
    fault(
        "of two attention types one is paid for",
        SchedulerMachine,
        (_Draft._take, "return sum(", "return max("),
        rule="the draft took no more than there is",
        world=HYBRID,
    ),
    fault(
        "long prompts are starved by short ones",  # case 22
        SchedulerMachine,
        (policies.prefill_first, "chain(state.overtaken, ", "chain("),
        rule="overtaking: ",
        world=PREFILL_FIRST,
    ),
]

SCHEDULE = [
    fault(
        "one token more than the budget",
        SchedulerMachine,
        (_Draft.__post_init__, "state.config.token_budget", "state.config.token_budget + 1"),
        rule="token budget: ",
    ),
    fault(
        "one row more than the budget",
        SchedulerMachine,
        (_Draft.__post_init__, "state.config.row_budget", "state.config.row_budget + 1"),
        (_Draft._admit, "self.num_active >= state", "self.num_active > state"),
        rule=("row budget: ", "rows: "),
    ),
    fault(
        "a request that is offered twice is planned twice",
        SchedulerMachine,
        (_Draft.fill, "todo_of[seat] = 0", "pass"),
        rule="plan: ",
        world={"make_policy": offers_all_twice},
    ),
    fault(
        "positions go on one too early",
        SchedulerMachine,
        (
            scheduling._build,
            "starts = sequences.num_computed[seats]",
            "starts = np.maximum(sequences.num_computed[seats] - 1, 0)",
        ),
        rule="positions: ",
    ),
    fault(
        "a page is missing where the tokens do not fill the last one",
        SchedulerMachine,
        (scheduling._hold_new, "-(-ends // spec.chunk_tokens(t))", "ends // spec.chunk_tokens(t)"),
        rule=("writes: ", "shared: ", "chunks: ", "reads: ", "padding: "),
    ),
    fault(
        "no page for the token whose value is not known yet",  # case 10
        PipelineMachine,
        (
            scheduling._build,
            "sequences, cache, seats, ends)",
            "sequences, cache, seats, np.minimum(ends, sequences.num_known[seats]))",
        ),
        rule=("writes: ", "shared: ", "reads: "),
    ),
    fault(
        "a resumed request samples from a chunk that is not its last",  # case 8
        SchedulerMachine,
        (
            scheduling._build,
            "samples = ends == num_tokens",
            "samples = ends >= sequences.prompt_len[seats]",
        ),
        rule="sampling: ",
    ),
    fault(
        "a request that has all its tokens holds a row",  # case 9
        PipelineMachine,
        (_Draft.fill, "s.num_tokens < s.limit", "s.num_tokens <= s.limit"),
        (BatchState._unfinished.fget, "s.num_tokens[s.order] <", "s.num_tokens[s.order] <="),
        rule="limit: ",
    ),
    fault(
        "the window lets go of a chunk that is still read",  # case 18
        SchedulerMachine,
        (committing._slide, "spec.sliding_window + 1", "spec.sliding_window + 2"),
        rule=("window: ", "reads: "),
        world=WINDOW,
    ),
    fault(
        "an old table is changed in place",
        SchedulerMachine,
        (
            sequence.occupy,
            "begin = sequences.first[attention_type].copy()",
            "begin = sequences.first[attention_type]; begin.flags.writeable = True",
        ),
        rule="old states: ",
    ),
    fault(
        "two states append to one log",
        SchedulerMachine,
        (TokenLog.append, "len(self.generated) != length", "len(self.generated) < length"),
        rule=("old states: ", "tokens: "),
    ),
]

PREEMPTION = [
    fault(
        "the oldest is preempted first",
        SchedulerMachine,
        (
            scheduling._relieve,
            "stalled.pop())\n        demand.pop()",
            "stalled.pop(0))\n        demand.pop(0)",
        ),
        rule="preemption: ",
        world=CROWDED,
    ),
    fault(
        "the last active request is preempted",
        PipelineMachine,
        (scheduling._relieve, "num_active > 1", "num_active > 0"),
        rule=("preemption: the last active ", "starvation: "),
        world=CROWDED,
    ),
    fault(
        "a request in the plan is preempted",
        SchedulerMachine,
        (scheduling._relieve, "sorted(draft.stalled,", "sorted([*draft.stalled, *draft.seats],"),
        rule="preemption: ",
        world=CROWDED,
    ),
    fault(
        "a preempted request is resumed while a token of it is in flight",  # case 7
        PipelineMachine,
        (ending.preempt, "in_flight=bool(s.num_tokens[seat] > known)", "in_flight=False"),
        rule="preemption: ",
        world=CROWDED,
    ),
    fault(
        "the token in flight of a preempted request is dropped",  # case 7
        PipelineMachine,
        (committing._commit_preempted, "plan.epochs[row] + 1", "plan.epochs[row]"),
        rule="outputs: ",
        world=CROWDED,
    ),
]

ENDS = [
    fault(
        "one token more than max_tokens",  # case 9
        SchedulerMachine,
        (committing._append, "s.num_known[seats] >= s.limit", "s.num_known[seats] > s.limit"),
        rule="end: ",
    ),
    fault(
        "a stop token does not end its request",
        SchedulerMachine,
        (committing._append, "np.flatnonzero(stopped | full)", "np.flatnonzero(full)"),
        rule="end: ",
    ),
    fault(
        "a request that ended by a token keeps its row",
        SchedulerMachine,
        (committing._hand_out, "state = end_active(state, gone)", "pass"),
        rule="seats: ",
    ),
    fault(
        "a cancelled request keeps its row",  # case 11
        SchedulerMachine,
        (scheduler._end, "state = end_active(state, np.array([seat], np.int32))", "pass"),
        rule="requests: ",
    ),
    fault(
        "a cancel is lost while the request is preempted and in flight",  # case 11
        PipelineMachine,
        (
            scheduler._end,
            "serial in state.entries:",
            "serial in state.entries and not state.entries[serial].in_flight:",
        ),
        rule=("outputs: ", "tokens: ", "end: "),
        world=CROWDED,
    ),
    fault(
        "a cancel gives two terminal outputs",  # case 11
        SchedulerMachine,
        (committing._hand_out, "replace(state, ended=()) if state.ended else state", "state"),
        rule=("requests: ", "outputs: "),
    ),
    fault(
        "a request that ends keeps its chunks",  # case 11
        SchedulerMachine,
        (ending.end_active, "prefix.release(state.cache, chunks)", "state.cache"),
        rule="owners: ",
    ),
    fault(
        "a request that ends keeps its sliding chunks",
        SchedulerMachine,
        (sequence.vacate, "in sequences.tables:", "in list(sequences.tables)[:1]:"),
        rule="owners: ",
        world=HYBRID,
    ),
    fault(
        "a request that ends lets go of each chunk twice",
        SchedulerMachine,
        (
            ending.end_active,
            "prefix.release(state.cache, chunks)",
            "prefix.release(state.cache, np.repeat(chunks, 2))",
        ),
        rule=("pages: only owned chunks are released", "owners: "),
    ),
    fault(
        "KV of a row that is no number is published",
        SchedulerMachine,
        (
            committing.commit,
            "state = _publish(state, plan, rows)",
            "state = _publish(state, plan, np.append(rows, bad))",
        ),
        rule="reads: ",
    ),
    fault(
        "a row that is no number fails only where it samples",
        SchedulerMachine,
        (
            committing.commit,
            "rows[~invalid[rows]], rows[invalid[rows]]",
            "rows, rows[invalid[rows] & plan.samples[rows]]",
        ),
        rule=("outputs: ", "StepResult.token_ids"),
    ),
    fault(
        "a row that is no number fails all rows of its step",
        SchedulerMachine,
        (
            committing.commit,
            "rows[~invalid[rows]], rows[invalid[rows]]",
            "rows[:0], rows",
        ),
        rule=("tokens: ", "end: "),
    ),
    fault(
        "a preempted request whose row is no number goes on",
        PipelineMachine,
        (committing._commit_preempted, "and result.invalid[row]:", "and False:"),
        rule=("outputs: ", "tokens: ", "end: "),
        world=CROWDED,
    ),
    fault(
        "a failed step fails all requests",
        PipelineMachine,
        (committing.commit, "ready, failed, result.error", "ready, s.order, result.error"),
        rule="outputs: ",
        world=SMALL_STEPS,
    ),
    fault(
        "an output grows after it was handed out",  # case 13
        SchedulerMachine,
        (TokenLog.ids, "ids = TokenIds(listed)", "ids = listed"),
        rule=("outputs: ", "old states: the same commit "),  # the outputs of a commit, made again
    ),
    fault(
        "steps are committed in any order",
        PipelineMachine,
        (committing.commit, "state.uncommitted[0] is not plan", "plan not in state.uncommitted"),
        rule="pipeline: ",
    ),
    fault(
        "a third step is planned while two run",
        PipelineMachine,
        (scheduling.schedule, "len(state.uncommitted) > 1", "len(state.uncommitted) > 2"),
        rule="pipeline: ",
    ),
]

PACK = [
    fault(
        "a token that the host has is awaited from the device",
        PipelineMachine,
        (scheduling._build, "pending=frozen(ends > known)", "pending=frozen(ends >= known)"),
        rule="pending: ",
    ),
    fault(
        "padding is written to the chunk that padding reads",
        SchedulerMachine,
        (plan.pack, "slots[num_tokens:] = spec.chunk_tokens(t)", "slots[num_tokens:] = 0"),
        rule="padding: ",
    ),
    fault(
        "padding rows read what an older batch left in the buffer",
        SchedulerMachine,
        (plan._fill_tables, "tables[:used, :, len(seats) :] = 0", "pass"),
        rule="padding: ",
    ),
    fault(
        "a carried token comes from its own row's number in the batch before",
        PipelineMachine,
        (plan._fill_carry_index, "1] - 1] = source", "1] - 1] = pending"),
        rule="carry: ",
    ),
    fault(
        "carry indices stand at the source and not at the destination",
        CarryOverMachine,
        (
            plan._fill_carry_index,
            "carry_index[cu_seqlens[pending + 1] - 1] = source",
            "carry_index.put(source, cu_seqlens[pending + 1] - 1, 'clip')",
        ),
        rule="carry: ",
    ),
    fault(
        "carry indices stand at the row and not at its token",
        CarryOverMachine,
        (
            plan._fill_carry_index,
            "carry_index[cu_seqlens[pending + 1] - 1]",
            "carry_index[pending]",
        ),
        rule="carry: ",
    ),
    fault(
        "a token is carried over a preemption",
        CarryOverMachine,
        (
            plan._fill_carry_index,
            "found &= previous.epochs[source] == plan.epochs[pending]",
            "pass",
        ),
        rule="carry: ",
    ),
    fault(
        "a token is carried from a row that samples none",
        CarryOverMachine,
        (plan._fill_carry_index, " & previous.samples[source]", ""),
        rule="carry: ",
    ),
    fault(
        "a token is carried from another request's row",
        CarryOverMachine,
        (
            plan._fill_carry_index,
            "(previous.serials[source] == plan.serials[pending]) & ",
            "",
        ),
        rule="carry: ",
    ),
    fault(
        "-1 is taken for the last row of the batch before",
        CarryOverMachine,
        (
            CarryOverMachine.carry_over,
            "np.where(carry_index >= 0, carried, input_ids)",
            "input_ids + previous_token_ids[carry_index]",
        ),
        rule="carry: ",
    ),
    fault(
        "row 0 of the batch before is taken for none",
        CarryOverMachine,
        (CarryOverMachine.carry_over, "carry_index >= 0", "carry_index > 0"),
        rule="carry: ",
    ),
]

STREAMS = [
    fault(
        "a step does not wait for its inputs",
        StreamsMachine,
        (TwoSlots._parts, "yield partial(self.compute.wait, slot.copied)", "pass"),
        rule="race: ",
    ),
    fault(
        "results are copied before they are computed",
        StreamsMachine,
        (TwoSlots._parts, "yield partial(self.copy_out.wait, slot.computed)", "pass"),
        rule=("race: ", "results: "),
    ),
    fault(
        "an event is recorded on another stream than its work",
        StreamsMachine,
        (TwoSlots._parts, "partial(self.compute.record,", "partial(self.copy_in.record,"),
        rule="race: ",
    ),
    fault(
        "the host reads results that it has not waited for",
        StreamsMachine,
        (TwoSlots.collect, "self.backend.host_wait(slot.returned)", "pass"),
        rule=("race: ", "results: "),
    ),
    fault(
        "the two slots compute on two streams, which share the KV",
        StreamsMachine,
        (
            TwoSlots._parts,
            'add(self.compute, "compute"',
            'add(self.copy_in if slot.index else self.compute, "compute"',
        ),
        rule="race: ",
    ),
    fault(
        "a slot is filled again before its step was collected",
        StreamsMachine,
        (TwoSlots.launch, "if slot.step is not None:", "if False:"),
        rule=("slots: ", "race: "),
    ),
    fault(
        "slots do not alternate",
        StreamsMachine,
        (TwoSlots.next_slot.fget, "self.slots[self.num_launched % 2]", "self.slots[0]"),
        rule="slots: ",
    ),
    fault(
        "steps are collected in any order",
        StreamsMachine,
        (TwoSlots.collect, "step != self.num_collected or ", ""),
        rule="order: ",
    ),
]

OFFLOAD = [
    fault(
        "what was saved is not told to the plan",
        PipelineMachine,
        (scheduling._with_moves, "plan.moves_beside + state.moves", "plan.moves_beside"),
        rule=("reads: ", "moves: "),
        world=OFFLOADING,
    ),
    fault(
        "a chunk is freed and written before it is saved",
        PipelineMachine,
        (scheduling._build, "moves_before=state.moves if", "moves_before=() if"),
        (
            scheduling._build,
            "moves_beside=loads if beside",
            "moves_beside=state.moves + loads if beside",
        ),
        rule="reads: ",
        world=OFFLOADING,
    ),
    fault(
        "a request reads what is still on its way back",
        PipelineMachine,
        (
            scheduling._build,
            "moves_before=state.moves if beside",
            "moves_before=state.moves if True",
        ),
        (scheduling._build, "moves_beside=loads if beside else ()", "moves_beside=loads"),
        rule="reads: ",
        world=OFFLOADING,
    ),
    fault(
        "host chunks are free as soon as they are filled",
        PipelineMachine,
        (offload.save, "replace(state, host=host, moves", "replace(state, moves"),
        rule="host: ",
        world=OFFLOADING,
    ),
    fault(
        "a request that ends in the queue keeps its host chunks",
        PipelineMachine,
        (ending.end_waiting, "offload.drop(state, state.entries[serial])", "state"),
        rule=("host: ", "at rest: "),
        world=OFFLOADING,
    ),
    fault(
        "the chunks come back in another order",
        PipelineMachine,
        (
            offload.load,
            "Move(False, np.concatenate(parts), host,",
            "Move(False, np.concatenate(parts)[::-1], host,",
        ),
        rule="reads: ",
        world=OFFLOADING,
    ),
    fault(
        "the token in flight is taken for computed",
        PipelineMachine,
        (
            offload.save,
            "num_computed = int(s.num_computed[seat])",
            "num_computed = int(s.num_tokens[seat])",
        ),
        rule=("host: ", "positions: ", "reads: ", "counts: ", "chunks: "),
        world=OFFLOADING,
    ),
    fault(
        "a step does not wait for the moves before it",
        StreamsMachine,
        (TwoSlots._parts, "yield partial(self.compute.wait, slot.ready)", "pass"),
        rule=("race: ", "moves: "),
    ),
    fault(
        "a step does not wait for the moves beside the one before",
        StreamsMachine,
        (TwoSlots._parts, "yield partial(self.compute.wait, before.moved)", "pass"),
        rule=("race: ", "moves: "),
    ),
    fault(
        "moves do not wait for the step before",
        StreamsMachine,
        (TwoSlots._parts, "yield partial(self.moves.wait, before.computed)", "pass"),
        rule=("race: ", "moves: "),
    ),
]

FAULTS = [
    *PAGES,
    *PREFIX,
    *ADMISSION,
    *SCHEDULE,
    *PREEMPTION,
    *ENDS,
    *PACK,
    *STREAMS,
    *OFFLOAD,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found_for_the_right_reason(fault):
    mine = type("Mine", (fault.machine,), dict(fault.world))
    with planted(*fault.edits):
        found = verdict(mine)
    assert found.startswith(fault.rules)
