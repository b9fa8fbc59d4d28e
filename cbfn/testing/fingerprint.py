"""A digest of a whole state: two equal ones mean that nothing in it has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from cbfn.config import EngineConfig
from cbfn.sequence import TokenLog
from cbfn.state import BatchState
from cbfn.types import CacheSpec, Request, RequestOutput, Tokens


def fingerprint(value: Any) -> bytes:
    """Returns a digest of everything that `value` holds, arrays, maps and dataclasses included.

    Token logs grow behind a state's back by design, so of them only the part that the state calls
    its own is in the digest. Values that can not change are in it by their identity.
    """
    parts: list[bytes] = []
    _feed(parts.append, set(), value)
    return blake2b(b"|".join(parts), digest_size=16).digest()


def _feed(put: Callable[[bytes], None], seen: set[int], value: Any) -> None:
    kind = type(value)
    if kind is np.ndarray:
        if value.dtype.char == "O":
            for item in value.ravel().tolist():
                _feed(put, seen, item)
        else:
            put(b"%d" % value.size)
            put(value.tobytes())
    elif kind is int or kind is str or kind is bytes or kind is float or value is None:
        put(repr(value).encode())
    elif kind is tuple or kind is list:
        put(b"%d" % len(value))
        for item in value:
            _feed(put, seen, item)
    elif kind in (CacheSpec, EngineConfig, Request):
        put(b"%d" % id(value))
    elif kind is TokenLog:
        put(value.prompt.tobytes())
    elif kind is Tokens:
        put(repr(value[:]).encode())
    elif kind is RequestOutput:
        put(repr((value.request_id, value.token_ids[:], value.status)).encode())
        put(repr((value.finish_reason, value.stop_reason, value.times)).encode())
    elif is_dataclass(kind):
        if id(value) not in seen:  # plans share the tables of the states that they are from
            seen.add(id(value))
            for name in _names(kind):
                _feed(put, seen, getattr(value, name))
        if kind is BatchState:
            _feed_tokens(put, value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            put(repr(key).encode())
            _feed(put, seen, value[key])
    elif isinstance(value, tuple):
        for item in value:
            _feed(put, seen, item)
    elif callable(value):
        put(b"%d" % id(value))
    else:
        put(repr(value).encode())


def _feed_tokens(put: Callable[[bytes], None], state: BatchState) -> None:
    """The tokens of all requests, as far as they are the state's."""
    s = state.sequences
    for seat in s.order.tolist():
        put(s.log[seat].generated[: s.num_generated[seat]].tobytes())
    for serial in state.queue:
        entry = state.entries[serial]
        put(entry.log.generated[: entry.num_generated].tobytes())


@lru_cache(maxsize=64)
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
