"""Comparison of the simulator with vLLM itself.

Invariant: the authority is vLLM's own code at the version that the executor runs, never a copy of its rules.
"""

from __future__ import annotations

import logging

# Before vLLM is imported: what it has to say is about running a model, and none is run here.
logging.getLogger("vllm").setLevel(logging.ERROR)
