"""What machines are tried with, where several tests want the same."""

from zlib import crc32

from hypothesis import strategies as st

from cbfn.testing import strategies

# memory is short, and the host takes what is preempted, or some of it
OFFLOADING = {
    "specs": st.one_of(
        strategies.cache_specs(max_chunks=12, max_page_size=2, num_host_chunks=(1, 4, 20)),
        strategies.cache_specs(max_chunks=12, max_page_size=1, max_layers=1, num_host_chunks=(20,)),
    ),
    "configs": strategies.engine_configs(safety_margins=(0.0,), max_batch_tokens=8),
}


def in_any_order(state):
    """A policy that takes requests in an order that changes from step to step."""
    requests = [*state.decoding, *state.prefilling, *state.waiting]
    return sorted(requests, key=lambda i: crc32(f"{i} {state.next_step}".encode()))
