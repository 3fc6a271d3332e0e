"""What is known of the engine without importing it.

Invariant: a fact stands here once; the engine is started with it and the planner prices with it.
"""

from __future__ import annotations

BLOCK_TOKENS = 32  # vLLM's CPU attention works on blocks of this many tokens, and its prefix cache keeps whole blocks
