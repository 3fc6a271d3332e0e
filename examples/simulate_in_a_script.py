"""Compare routing policies from a script of your own: python examples/simulate_in_a_script.py"""

from pathlib import Path

import libra

HERE = Path(__file__).parent

deployment = libra.load_engines(HERE / "engines.yaml")
workload = libra.recorded_requests(libra.read_requests(HERE / "requests.jsonl"), rate_scale=4.0)
for route in ("round-robin", "least-loaded"):
    result = libra.simulate(deployment.engines, workload, route, turn_tokens=deployment.turn_tokens)
    found = libra.metrics_of(result)
    print(f"{route}: {found.makespan:.2f} s, TTFT P90 {found.ttft.p90:.3f} s, {found.cache_hit_rate:.0%} cache hits")
