"""A length predictor: ridge regression of the final context on what is known of a prompt before its first turn.

Invariant: the coefficients are those of the ridge regression over all finished trajectories, each weighed
`2 ** (-n / HALF_LIFE)` with n the number that finished after it, and each with the features it had when it was placed.
"""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from libra.route.bucket import Bucketed
from libra.route.policy import TurnRequest
from libra.trajectory import Trajectory

HALF_LIFE = 256.0  # trajectories, as the length tracker forgets
PENALTY = 1.0  # of a squared coefficient: as much as one trajectory that has the feature, and says 0
TASKS = 32  # a task is told from others by its hash, modulo this
FEATURES = 5 + TASKS
MAX_PROMPTS = 65_536  # whose earlier samples are remembered

_LOG_LIMIT = 40.0  # exp(40) K tokens: longer than any bucket, and still an integer

Array = NDArray[np.float64]


class Ridge:
    """Least squares with exponential forgetting and a penalty on all coefficients but the first, the intercept.

    What is kept are the normal equations, not their inverse: forgetting multiplies them by `decay`, a new sample adds
    to them, both O(features^2), and the penalty never fades, as it would in a recursively updated inverse. They are
    solved when first asked after that, O(features^3).
    """

    def __init__(self, features: int, penalty: float, decay: float) -> None:
        if features < 1:
            raise ValueError(f"features is {features}; the intercept is one, give 1 or more")
        if not penalty > 0:
            raise ValueError(f"penalty is {penalty}; give more than 0, or features that never differ have no solution")
        if not 0 < decay <= 1:
            raise ValueError(f"decay is {decay}; it must be above 0 and at most 1")
        self._penalty: Array = penalty * np.diag(np.arange(features) > 0).astype(np.float64)
        self._decay = decay
        self._square: Array = np.zeros((features, features))
        self._product: Array = np.zeros(features)
        self._solution: Array | None = None

    def add(self, x: Array, y: float) -> None:
        """One sample; `x[0]` is 1."""
        self._square *= self._decay
        self._square += np.outer(x, x)
        self._product *= self._decay
        self._product += x * y
        self._solution = None

    def coefficients(self) -> Array | None:
        """None before any sample."""
        if self._solution is None and self._square[0, 0] > 0:
            self._solution = np.linalg.solve(self._square + self._penalty, self._product).astype(np.float64, copy=False)
        return self._solution

    def snapshot(self) -> dict[str, Any]:
        return {"square": self._square.tolist(), "product": self._product.tolist()}

    def resume(self, snapshot: dict[str, Any]) -> None:
        self._square, self._product = np.array(snapshot["square"]), np.array(snapshot["product"])
        self._solution = None


def features(prompt_tokens: int, task: str, earlier: float | None) -> Array:
    """What is known of a prompt: 1, the log of its length and its square, whether it had samples before and their mean
    log final context (0 if none), and its task. Logs are natural and of K tokens (1,024); "" is no task."""
    x = np.zeros(FEATURES)
    length = log_k(prompt_tokens)
    x[:3] = 1.0, length, length**2
    if earlier is not None:
        x[3:5] = 1.0, earlier
    if task:
        x[5 + crc32(task.encode()) % TASKS] = 1.0
    return x


def log_k(tokens: int) -> float:
    """Natural log of K tokens (1,024); of one token where there are none."""
    return math.log(max(1, tokens) / 1_024)


class LengthPredictor(Bucketed):
    """The `length-predictor` policy: predicts the final context once, at the first turn.

    It stands for predictors that read the prompt (embeddings): in their place it has the `features` that a log of token
    counts gives. The exponential of the predicted log is the median of a log-normal length. The final context of a
    trajectory is the most tokens it ever held. Before any has finished, the prompt itself is all that is expected.
    """

    NAME = "length-predictor"
    REASON = "bucket by predicted length"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._ridge = Ridge(FEATURES, PENALTY, 2 ** (-1 / HALF_LIFE))
        self._prompts: dict[str, tuple[int, float]] = {}  # finished samples and their sum of logs, latest updated last
        # What was known when a live trajectory was placed. To learn with what is known when it finishes would be to
        # learn from samples of its group that ran beside it, which a prediction never has.
        self._asked: dict[str, tuple[int, str, float | None]] = {}

    def finished(self, trajectory: Trajectory) -> None:
        if not trajectory.finished:
            raise ValueError(f"trajectory {trajectory.id!r} is unfinished, so its length is unknown: forget it instead")
        known = self._asked.get(trajectory.id)
        if known is None:  # read from a log
            known = trajectory.prompt_tokens, trajectory.task, self._earlier(trajectory.prompt_id)
        length = log_k(trajectory.peak_context)
        self._ridge.add(features(*known), length)
        count, total = self._prompts.pop(trajectory.prompt_id, (0, 0.0))
        if len(self._prompts) == MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[trajectory.prompt_id] = count + 1, total + length
        super().finished(trajectory)

    def forget(self, trajectory_id: str) -> None:
        self._asked.pop(trajectory_id, None)
        super().forget(trajectory_id)

    def _expected(self, request: TurnRequest) -> int:
        known = request.prompt_tokens, request.task, self._earlier(request.prompt_id)
        self._asked[request.trajectory_id] = known
        coefficients = self._ridge.coefficients()
        if coefficients is None:
            return request.context_tokens
        predicted = float(features(*known) @ coefficients)
        return round(1_024 * math.exp(min(predicted, _LOG_LIMIT)))

    def _earlier(self, prompt_id: str) -> float | None:
        """Mean log final context of the prompt's finished samples."""
        if prompt_id not in self._prompts:
            return None
        count, total = self._prompts[prompt_id]
        return total / count

    def _rule(self) -> dict[str, Any]:
        return {
            "ridge": self._ridge.snapshot(),
            "prompts": [[id, *samples] for id, samples in self._prompts.items()],
            "asked": [[id, *known] for id, known in self._asked.items()],
        }

    def _resume(self, rule: dict[str, Any]) -> None:
        self._ridge.resume(rule["ridge"])
        self._prompts = {id: (count, total) for id, count, total in rule["prompts"]}
        self._asked = {id: (prompt_tokens, task, earlier) for id, prompt_tokens, task, earlier in rule["asked"]}
