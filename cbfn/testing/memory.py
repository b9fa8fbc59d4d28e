"""A KV memory that knows what every line of it should hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int, Int32

from cbfn.pages import Pool
from cbfn.plan import PackedBatch
from cbfn.testing.chunks import Chunks
from cbfn.testing.hashing import EMPTY, extend, first_read, vocabulary
from cbfn.types import (
    NUM_NULL_CHUNKS,
    CacheSpec,
    InvariantViolation,
    Move,
    Plan,
    Request,
    RequestId,
)

POISON = -(2**31)  # what a row returns that samples nothing, or whose logits are no numbers


class _Own:
    """The true tokens of one request, and the content of each prefix of them."""

    __slots__ = ("content", "length", "tokens")

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens = np.zeros(64, np.int32)
        self.content = np.zeros(64, np.uint64)
        self.length = 0
        for token in prompt:
            self.append(int(token))

    def append(self, token: int) -> None:
        at = self.length
        if at == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
            self.content = np.concatenate([self.content, np.zeros_like(self.content)])
        before = int(self.content[at - 1]) if at else EMPTY
        self.tokens[at] = token
        self.content[at] = extend(before, token)
        self.length = at + 1


@dataclass
class KVMemory:
    """A KV cache that replays launches in order and checks every line that is written or read.

    A line holds its position, token, the content of the prefix that ends there, its writer's
    serial and the weight version of its writer's admission. A chunk that is written by one
    attention type loses all lines of the other.

    Arguments:
        spec: sizes and attention types.
        weight_version: of the weights that newly admitted requests are computed with.
    """

    spec: CacheSpec
    weight_version: int = 0
    _chunks: Chunks = field(init=False, repr=False)
    _prompts: dict[RequestId, Sequence[int]] = field(default_factory=dict, repr=False)
    _own: dict[int, _Own] = field(default_factory=dict, repr=False)
    _versions: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    _broken: set[tuple[int, int]] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._chunks = Chunks(self.spec)

    def register(self, request: Request) -> None:
        """Remembers a prompt, so that it is not taken from the plan that is to be checked."""
        self._prompts[request.request_id] = tuple(request.prompt_token_ids)

    def tokens_of(self, serial: int) -> tuple[int, ...]:
        """Returns all tokens of a request, the sampled ones included; () for one never seen."""
        own = self._own.get(serial)
        return tuple(own.tokens[: own.length].tolist()) if own else ()

    def launch(
        self,
        packed: PackedBatch,
        plan: Plan,
        previous_token_ids: Int[np.ndarray, "R"] | None = None,
        *,
        pool: Pool | None = None,
        failed: bool = False,
        invalid: Bool[np.ndarray, "B"] | None = None,
    ) -> Int32[np.ndarray, "B"]:
        """Returns the token that each row samples, computed from what the row read; `POISON` for
        rows that sample nothing, and for `invalid` ones.

        `previous_token_ids` is what the launch before returned. `pool` is the pool of the state
        that `plan` was made in: with it, a write to a shared or published chunk is found even where
        the value is the same. A `failed` launch leaves garbage in all lines that it should write,
        an invalid row in its own: nothing of these may be read for another request.

        Raises InvariantViolation for a wrong input token, a line that is written by the wrong row,
        and a line that is read and does not hold the reader's own token.
        """
        owns = [self._own_of(plan, row) for row in range(len(plan))]
        keys = list(zip(plan.serials.tolist(), plan.epochs.tolist(), strict=True))
        early = plan.step % 2 == 0  # moves beside the launch may run before it or behind it
        for move in plan.moves if early else plan.moves_before:
            self._move(move, failed)
        for key in keys:
            self._versions.setdefault(key, self.weight_version)
        if failed:
            self._broken.update(keys)
            self._broken.update((m.serial, m.epoch) for m in plan.moves if not m.to_host)
        if invalid is not None:
            self._broken.update(keys[row] for row in np.flatnonzero(invalid).tolist())
        sound = np.array([key not in self._broken for key in keys], bool)
        inputs = self._inputs(packed, previous_token_ids)
        self._check_shapes(packed, plan)
        self._check_inputs(packed, plan, owns, inputs, sound)
        for t in self.spec.attention_types:
            self._check_writes(packed, plan, t, pool)
        starts_content = self._contents_before(packed, plan, sound)
        contents = self._write(packed, plan, inputs, starts_content, sound)
        for t in self.spec.attention_types:
            self._check_reads(packed, plan, t, owns, sound)
        sampled = np.full(len(plan), POISON, np.int32)
        for row in np.flatnonzero(plan.samples).tolist():
            end = int(plan.starts[row] + plan.num_tokens[row])
            sampled[row] = contents[row] % vocabulary(self.spec)
            if not sound[row]:
                continue  # garbage, but a token
            if owns[row].length != end:
                _broken(
                    "sampling",
                    f"{_name(plan, row)} samples position {end}, whose token is there already",
                )
            owns[row].append(int(sampled[row]))
        if invalid is not None:
            sampled[invalid] = POISON
        if not early:
            for move in plan.moves_beside:
                self._move(move, failed)
        return sampled

    def _move(self, move: Move, failed: bool) -> None:
        """Copies chunks to the host or back; a failed launch leaves garbage in the targets."""
        if len(move.device) != len(move.host) or not len(move.device):
            _broken("moves", f"{len(move.device)} chunks against {len(move.host)} on the host")
        for device, host in zip(move.device.tolist(), move.host.tolist(), strict=True):
            if not NUM_NULL_CHUNKS <= device < self.spec.num_chunks:
                _broken("moves", f"chunk {device} of serial {move.serial} is none to be moved")
            if not 0 <= host - NUM_NULL_CHUNKS < self.spec.num_host_chunks:
                _broken("moves", f"host chunk {host} of serial {move.serial} does not exist")
            if move.to_host:
                self._chunks.save(device, host, garbage=failed)
            else:
                version = self._chunks.load(device, host, garbage=failed)
                if version is not None:
                    self._versions[move.serial, move.epoch] = version

    def _own_of(self, plan: Plan, row: int) -> _Own:
        serial = int(plan.serials[row])
        own = self._own.get(serial)
        if own is None:
            prompt = self._prompts.get(plan.request_ids[row])
            if prompt is None:
                request = plan.inputs.sequences.request[plan.inputs.seats[row]]
                prompt = request.prompt_token_ids
            own = self._own[serial] = _Own(prompt)
        return own

    def _inputs(self, packed: PackedBatch, previous: np.ndarray | None) -> np.ndarray:
        """Returns the input tokens with the carried ones filled in."""
        carry = packed.carry_index
        carried = np.flatnonzero(carry >= 0)
        inputs = packed.input_ids.copy()
        if len(carried):
            if previous is None or carry.max() >= len(previous):
                raise InvariantViolation(f"carry: row {carry.max()} of {previous} is carried")
            if inputs[carried].any():
                _broken("carry", f"input_ids is not 0 at the carried tokens {carried}")
            inputs[carried] = previous[carry[carried]]
        return inputs

    def _check_shapes(self, packed: PackedBatch, plan: Plan) -> None:
        """The rows tile the tokens, and padding stays with the null chunks."""
        rows, tokens = len(plan), int(plan.num_tokens.sum())
        spans = np.diff(packed.cu_seqlens)
        if not np.array_equal(spans[:rows], plan.num_tokens) or spans[rows:].any():
            _broken("packing", f"rows span {spans} tokens, planned are {plan.num_tokens}")
        ends = plan.starts + plan.num_tokens
        if not np.array_equal(packed.seq_lens[:rows], ends) or packed.seq_lens[rows:].any():
            _broken("packing", f"seq_lens is {packed.seq_lens}, expected {ends} and zeros")
        if not np.array_equal(packed.logits_index[:rows], packed.cu_seqlens[1 : rows + 1] - 1):
            _broken("packing", f"logits_index {packed.logits_index} is not each row's last token")
        expected = np.concatenate(
            [np.arange(s, e) for s, e in zip(plan.starts.tolist(), ends.tolist(), strict=True)]
        )
        if not np.array_equal(packed.positions[:tokens], expected):
            _broken("packing", f"positions {packed.positions[:tokens]}, expected {expected}")
        width = -(-int(ends.max()) // self.spec.page_size)  # behind it is what a buffer had before
        for t in self.spec.attention_types:
            written = packed.slot_mapping[t][tokens:] // self.spec.chunk_tokens(t)
            read = packed.block_table[t][rows:, :width] // self.spec.blocks_per_chunk(t)
            if (written != 1).any() or read.any():
                _broken("padding", f"of {t} it writes to chunks {written} and reads {read}")

    def _check_inputs(
        self,
        packed: PackedBatch,
        plan: Plan,
        owns: list[_Own],
        inputs: np.ndarray,
        sound: np.ndarray,
    ) -> None:
        for row in np.flatnonzero(sound).tolist():
            own, start = owns[row], int(plan.starts[row])
            end = start + int(plan.num_tokens[row])
            mine = inputs[packed.cu_seqlens[row] : packed.cu_seqlens[row + 1]]
            if end > own.length or not np.array_equal(mine, own.tokens[start:end]):
                _broken(
                    "tokens",
                    f"{_name(plan, row)} is fed {mine} at positions {start} to {end - 1}, "
                    f"its own are {own.tokens[start : min(end, own.length)]}",
                )

    def _check_writes(self, packed: PackedBatch, plan: Plan, t: str, pool: Pool | None) -> None:
        page, size = self.spec.page_size, self.spec.chunk_tokens(t)
        tokens = int(plan.num_tokens.sum())
        slots = packed.slot_mapping[t][:tokens]
        row_of = np.repeat(np.arange(len(plan)), plan.num_tokens)
        positions = packed.positions[:tokens]
        expected = packed.block_table[t][row_of, positions // page] * page + positions % page
        if not np.array_equal(slots, expected):
            _broken("writes", f"slot_mapping of {t} is {slots}, its block table says {expected}")
        chunks = slots // size
        outside = (chunks < NUM_NULL_CHUNKS) | (chunks >= self.spec.num_chunks)
        for at in np.flatnonzero(outside)[:1].tolist():
            _broken(
                "writes",
                f"{_name(plan, row_of[at])} writes position {positions[at]} to chunk {chunks[at]}, "
                "a null chunk or none at all",
            )
        if len(np.unique(slots)) != tokens:
            _broken("writes", f"two tokens are written to one line of {t}: {slots}")
        if len({*zip(chunks.tolist(), row_of.tolist(), strict=True)}) != len(np.unique(chunks)):
            _broken("writes", f"two rows write to one chunk of {t}: {chunks}")
        if pool is not None:
            owners, published = pool.owners[chunks], pool.published[chunks]
            for at in np.flatnonzero((owners != 1) | published)[:1].tolist():
                _broken(
                    "shared",
                    f"{_name(plan, row_of[at])} writes to chunk {chunks[at]}, which has "
                    f"{owners[at]} owners and is {'' if published[at] else 'not '}published",
                )

    def _contents_before(self, packed: PackedBatch, plan: Plan, sound: np.ndarray) -> list[int]:
        """Returns for each row the content of what lies before its first token, as read."""
        t = self.spec.attention_types[0]
        page, contents = self.spec.page_size, []
        for row, start in enumerate(plan.starts.tolist()):
            if start == 0 or not sound[row]:
                contents.append(EMPTY)
            elif first_read(self.spec, t, start) == start:  # a window of one token
                contents.append(int(self._own[int(plan.serials[row])].content[start - 1]))
            else:
                before = start - 1
                slot = packed.block_table[t][row, before // page] * page + before % page
                contents.append(int(self._chunks.lines[t].content[slot]))
        return contents

    def _write(
        self,
        packed: PackedBatch,
        plan: Plan,
        inputs: np.ndarray,
        contents: list[int],
        sound: np.ndarray,
    ) -> list[int]:
        """Writes all lines; returns the content of each row's last token."""
        tokens = int(plan.num_tokens.sum())
        row_of = np.repeat(np.arange(len(plan)), plan.num_tokens)
        written = np.zeros(tokens, np.uint64)
        contents = list(contents)
        for at, (row, token) in enumerate(
            zip(row_of.tolist(), inputs[:tokens].tolist(), strict=True)
        ):
            contents[row] = extend(contents[row], token)
            written[at] = contents[row]
        keys = zip(plan.serials.tolist(), plan.epochs.tolist(), strict=True)
        versions = np.array([self._versions[key] for key in keys], np.int32)
        good = sound[row_of]
        for number, t in enumerate(self.spec.attention_types):
            lines, slots = self._chunks.lines[t], packed.slot_mapping[t][:tokens]
            self._chunks.take(np.unique(slots // self.spec.chunk_tokens(t)), number)
            lines.position[slots] = np.where(good, packed.positions[:tokens], -2)
            lines.token[slots] = np.where(good, inputs[:tokens], -2)
            lines.content[slots] = np.where(good, written, np.uint64(0))
            lines.owner[slots] = plan.serials[row_of]
            lines.version[slots] = versions[row_of]
        return contents

    def _check_reads(
        self, packed: PackedBatch, plan: Plan, t: str, owns: list[_Own], sound: np.ndarray
    ) -> None:
        """Every line that a row's attention reads holds the row's own token."""
        rows = np.flatnonzero(sound).tolist()
        spans = [
            (first_read(self.spec, t, int(plan.starts[row])), int(packed.seq_lens[row]))
            for row in rows
        ]
        if not rows:
            return
        positions = np.concatenate([np.arange(first, end) for first, end in spans])
        row_of = np.repeat(rows, [end - first for first, end in spans])
        page, lines = self.spec.page_size, self._chunks.lines[t]
        slots = packed.block_table[t][row_of, positions // page] * page + positions % page
        content = np.concatenate(
            [owns[r].content[first:end] for r, (first, end) in zip(rows, spans, strict=True)]
        )
        tokens = np.concatenate(
            [owns[r].tokens[first:end] for r, (first, end) in zip(rows, spans, strict=True)]
        )
        right = (lines.position[slots] == positions) & (lines.token[slots] == tokens)
        right &= lines.content[slots] == content
        for at in np.flatnonzero(~right)[:1].tolist():
            slot, row = int(slots[at]), int(row_of[at])
            _broken(
                "reads",
                f"{_name(plan, row)} reads position {positions[at]} of {t} in chunk "
                f"{slot // self.spec.chunk_tokens(t)}: expected its token {tokens[at]}, found "
                f"token {lines.token[slot]} at position {lines.position[slot]}, "
                f"written by serial {lines.owner[slot]}"
                + ("" if lines.token[slot] != tokens[at] else " behind another prefix"),
            )
        keys = zip(plan.serials.tolist(), plan.epochs.tolist(), strict=True)
        versions = np.array([self._versions[key] for key in keys])
        stale = lines.version[slots] != versions[row_of]
        for at in np.flatnonzero(stale)[:1].tolist():
            _broken(
                "weights",
                f"{_name(plan, int(row_of[at]))} reads KV of weight version "
                f"{lines.version[slots[at]]}, it was admitted at {versions[row_of[at]]}",
            )


def _name(plan: Plan, row: int) -> str:
    return f"request {plan.request_ids[row]!r} (row {row} of step {plan.step})"


def _broken(rule: str, what: str) -> None:
    raise InvariantViolation(f"{rule}: {what}")
