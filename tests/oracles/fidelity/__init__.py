"""vLLM's own schedulers beside the simulated ones, on random engines and requests that are hard to schedule.

Invariant: the authority is vLLM's own code at the version that the executor runs, never a copy of its rules.

It is imported from the root of the repository, as `benchmarks.fidelity` compares with it, too.
"""

from __future__ import annotations

import logging

# Before vLLM is imported: what it has to say is about running a model, and none is run here.
logging.getLogger("vllm").setLevel(logging.ERROR)
