"""What machines are tried with, where several tests want the same."""

from cbfn.testing import strategies

# memory is short, and the host takes what is preempted, or some of it
OFFLOADING = {
    "specs": strategies.cache_specs(max_chunks=12, max_page_size=2, num_host_chunks=(1, 4, 20)),
    "configs": strategies.engine_configs(safety_margins=(0.0,)),
}
