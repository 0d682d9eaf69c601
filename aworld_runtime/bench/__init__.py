"""Measures the product on the machine it runs on: `aworld bench`.

    bus           throughput per core-second, latency, the ceiling of the server, peers
    idle          memory of an episode that waits
    backpressure  memory under a load that its consumer can't follow

Every figure comes with a verification of what was measured: where that fails, the exit code is 1.
"""
