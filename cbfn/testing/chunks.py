"""What the chunks of a KV cache hold, on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbfn.types import CacheSpec


@dataclass
class Lines:
    """The KV lines of one attention type, by slot; position -1 where nothing was written."""

    position: np.ndarray
    token: np.ndarray
    content: np.ndarray
    owner: np.ndarray
    version: np.ndarray

    @property
    def all(self) -> tuple[np.ndarray, ...]:
        return self.position, self.token, self.content, self.owner, self.version


class Chunks:
    """Lines of each attention type over the same chunks, of which each has one type at a time."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.lines: dict[str, Lines] = {}
        self._type_of = np.full(spec.num_chunks, -1)
        # a chunk's type and its lines of each; None for garbage
        self._host: dict[int, tuple[int, dict[str, Lines]] | None] = {}
        for t in spec.attention_types:
            slots = spec.num_chunks * spec.chunk_tokens(t)
            self.lines[t] = Lines(
                position=np.full(slots, -1, np.int32),
                token=np.full(slots, -1, np.int32),
                content=np.zeros(slots, np.uint64),
                owner=np.full(slots, -1, np.int64),
                version=np.full(slots, -1, np.int32),
            )

    def take(self, chunks: np.ndarray, number: int) -> None:
        """Wipes what other attention types have in chunks that are now written by one."""
        for chunk in chunks[self._type_of[chunks] != number].tolist():
            for t, lines in self.lines.items():
                lines.position[self._part(chunk, t)] = -1
            self._type_of[chunk] = number

    def save(self, chunk: int, host: int, garbage: bool) -> None:
        """Copies a chunk to the host, or garbage."""
        lines = {
            t: Lines(*(column[self._part(chunk, t)].copy() for column in lines.all))
            for t, lines in self.lines.items()
        }
        self._host[host] = None if garbage else (int(self._type_of[chunk]), lines)

    def load(self, chunk: int, host: int, garbage: bool) -> int | None:
        """Copies a chunk from the host, or garbage; returns its weight version, if it has one."""
        saved = None if garbage else self._host.get(host)
        for t, lines in self.lines.items():
            part = self._part(chunk, t)
            lines.position[part] = -2
            if saved is not None:
                for column, values in zip(lines.all, saved[1][t].all, strict=True):
                    column[part] = values
        self._type_of[chunk] = -1 if saved is None else saved[0]
        return None if saved is None else max(int(t.version.max()) for t in saved[1].values())

    def _part(self, chunk: int, attention_type: str) -> slice:
        """Returns where a chunk's lines are."""
        size = self.spec.chunk_tokens(attention_type)
        return slice(chunk * size, (chunk + 1) * size)
