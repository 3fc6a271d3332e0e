"""What these tests compute in: what this machine multiplies fast, as a run would choose."""

from __future__ import annotations

from collections.abc import Mapping

from libra.backends.machine import Chosen, choose, probe

PRECISION: Chosen = choose("auto", [probe("cpu")]).precision

# The largest difference of two log-probs of one token under one version of these tiny models, engine against trainer.
# Both round every layer's output to 2^-9 of it in bf16, to 2^-25 in fp32, of which a few layers and logits of about 10
# make 0.1 and 1e-5. Weights that are one step apart, or KV that is another context's, make more than either.
LOGPROB_GAP: Mapping[str, float] = {"bf16": 0.15, "fp32": 1e-3}
