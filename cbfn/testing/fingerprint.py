"""A digest of a whole state: two equal ones mean that nothing in it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from cbfn.sequence import TokenLog
from cbfn.state import BatchState
from cbfn.types import RequestOutput, Tokens


def fingerprint(value: Any) -> bytes:
    """Returns a digest of everything that `value` holds, arrays, maps and dataclasses included.

    Token logs grow behind a state's back by design, so of them only the part that the state calls
    its own is in the digest.
    """
    digest = blake2b(digest_size=16)
    _feed(digest, value)
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    put = digest.update
    if isinstance(value, np.ndarray):
        put(f"array {value.dtype} {value.shape}".encode())
        if value.dtype == object:
            for item in value.ravel().tolist():
                _feed(digest, item)
        else:
            put(value.tobytes())
    elif isinstance(value, TokenLog):
        put(value.prompt.tobytes())
    elif isinstance(value, Tokens):
        put(repr(value[:]).encode())
    elif isinstance(value, BatchState):
        _feed_dataclass(digest, value)
        s = value.sequences
        for seat in s.order.tolist():
            put(repr(s.log[seat].generated[: s.num_generated[seat]]).encode())
        for entry in value.entries.values():
            put(repr(entry.log.generated[: entry.num_generated]).encode())
    elif isinstance(value, RequestOutput):
        put(repr((value.request_id, value.token_ids[:], value.status)).encode())
        put(repr((value.finish_reason, value.stop_reason, value.times)).encode())
    elif is_dataclass(value) and not isinstance(value, type):
        _feed_dataclass(digest, value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            put(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (tuple, list)):
        put(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif callable(value):
        put(str(id(value)).encode())
    else:
        put(repr(value).encode())


def _feed_dataclass(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    for field in fields(value):
        digest.update(field.name.encode())
        _feed(digest, getattr(value, field.name))
