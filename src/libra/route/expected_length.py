"""Rules that predict the final context from the prompt: by the rank of its length, or by ridge regression.

In both rules, weights decay exponentially: a trajectory weighs `2 ** (-n / HALF_LIFE)` after n later trajectories have
finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from libra.route.bucket import Bucketed
from libra.route.policy import TurnRequest
from libra.route.tool_state import require_finished
from libra.trajectory import Trajectory

HALF_LIFE = 256.0  # in trajectories, as in the length tracker
KEPT = 1_024  # four half-lives, after which trajectories weigh a sixteenth or less

PENALTY = 1.0  # on a squared coefficient; as much as one trajectory with this feature and target 0
TASKS = 32  # tasks are distinguished by their hash modulo this number
FEATURES = 5 + TASKS
MAX_PROMPTS = 65_536  # prompts whose earlier samples are stored

_LOG_LIMIT = 40.0  # exp(40) K tokens, longer than any bucket and still a valid integer

Array = NDArray[np.float64]


class QuantileMatch:
    """Maps a prompt length to the final context of the same rank among the latest trajectories.

    A trajectory weighs `2 ** (-n / half_life)` after n later trajectories have finished. Only the latest `kept` are
    stored.
    """

    def __init__(self, kept: int = KEPT, half_life: float = HALF_LIFE, pairs: Iterable[tuple[int, int]] = ()) -> None:
        if kept < 1:
            raise ValueError(f"kept is {kept}; it is a number of trajectories, 1 or more")
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}; it is a number of trajectories, above 0")
        self._half_life = half_life
        self._ring = np.zeros((kept, 2))
        self._added = 0
        self._sorted: tuple[Array, Array, Array, Array] | None = None  # computed by `match`, reset by `add`
        for pair in pairs:
            self.add(*pair)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Prompt and final context of each stored trajectory, oldest first."""
        return [(int(prompt), int(final)) for prompt, final in self._kept()]

    def add(self, prompt_tokens: int, final_context: int) -> None:
        self._ring[self._added % len(self._ring)] = prompt_tokens, final_context
        self._added += 1
        self._sorted = None

    def match(self, prompt_tokens: int) -> int | None:
        """Final context in tokens for a prompt of this length; None before any trajectory.

        The rank of a prompt is the share of shorter prompts plus half the share of equally long prompts. So if all
        prompts are equally long, every match is the median. The match is the smallest final context with at least this
        share of trajectories at or below it. O(log kept), and O(kept log kept) for the first call after an `add`.
        """
        if not self._added:
            return None
        if self._sorted is None:
            self._sorted = self._sort()
        prompts, below, finals, up_to = self._sorted
        shorter, no_longer = prompts.searchsorted(prompt_tokens), prompts.searchsorted(prompt_tokens, "right")
        rank = (below[shorter] + below[no_longer]) / 2
        return int(finals[min(int(up_to.searchsorted(rank)), len(finals) - 1)])

    def _kept(self) -> Array:
        oldest = self._added % len(self._ring) if self._added > len(self._ring) else 0
        return np.concatenate([self._ring[oldest : self._added], self._ring[:oldest]])

    def _sort(self) -> tuple[Array, Array, Array, Array]:
        """Sorted prompts with the weight before each and the total weight, and sorted final contexts with the weight up
        to each.
        """
        prompts, finals = self._kept().T
        weights = 2.0 ** (-np.arange(len(prompts))[::-1] / self._half_life)
        by_prompt, by_final = np.argsort(prompts, kind="stable"), np.argsort(finals, kind="stable")
        below = np.concatenate([[0.0], weights[by_prompt].cumsum()])
        return prompts[by_prompt], below, finals[by_final], weights[by_final].cumsum()


class LengthByPrompt(Bucketed):
    """The `length-by-prompt` policy: `QuantileMatch` predicts the final context at the first turn.

    The final context of a trajectory is its largest context. Before any trajectory has finished, the prediction is the
    prompt itself.
    """

    NAME = "length-by-prompt"
    REASON = "bucket by prompt length"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._match = QuantileMatch()

    def finished(self, trajectory: Trajectory) -> None:
        require_finished(trajectory)
        self._match.add(trajectory.prompt_tokens, trajectory.peak_context)
        super().finished(trajectory)

    def _expected(self, request: TurnRequest) -> int:
        matched = self._match.match(request.prompt_tokens)
        return request.context_tokens if matched is None else matched

    def _rule(self) -> list[list[int]]:
        return [list(pair) for pair in self._match.pairs]

    def _resume_rule(self, rule: list[list[int]]) -> None:
        self._match = QuantileMatch(pairs=[(prompt, final) for prompt, final in rule])


class Ridge:
    """Least squares with exponential forgetting, and a penalty on all coefficients except the first, the intercept.

    The normal equations are stored, not their inverse. Each `add` multiplies them by `decay` and adds a sample, in
    O(features^2). So the penalty does not fade, as it would in a recursively updated inverse. `coefficients` solves
    them once after each `add`, in O(features^3).
    """

    def __init__(self, features: int, penalty: float, decay: float) -> None:
        if features < 1:
            raise ValueError(f"features is {features}; give 1 or more, the intercept included")
        if not penalty > 0:
            raise ValueError(f"penalty is {penalty}; give more than 0, or there is no solution for constant features")
        if not 0 < decay <= 1:
            raise ValueError(f"decay is {decay}; it must be above 0 and at most 1")
        self._penalty: Array = penalty * np.diag(np.arange(features) > 0).astype(np.float64)
        self._decay = decay
        self._square: Array = np.zeros((features, features))
        self._product: Array = np.zeros(features)
        self._solution: Array | None = None

    def add(self, x: Array, y: float) -> None:
        """Add one sample; `x[0]` must be 1."""
        self._square *= self._decay
        self._square += np.outer(x, x)
        self._product *= self._decay
        self._product += x * y
        self._solution = None

    def coefficients(self) -> Array | None:
        """The solution of the normal equations; None before any sample."""
        if self._solution is None and self._square[0, 0] > 0:
            self._solution = np.linalg.solve(self._square + self._penalty, self._product).astype(np.float64, copy=False)
        return self._solution

    def snapshot(self) -> dict[str, Any]:
        return {"square": self._square.tolist(), "product": self._product.tolist()}

    def resume(self, snapshot: dict[str, Any]) -> None:
        self._square, self._product = np.array(snapshot["square"]), np.array(snapshot["product"])
        self._solution = None


def features(prompt_tokens: int, task: str, earlier: float | None) -> Array:
    """Features of a prompt: 1, the log of its length, the square of this log, whether the prompt has earlier samples,
    the mean log final context of these samples (0 without samples), and the prompt's task. Logs are natural, of K
    tokens (1,024). An empty `task` means no task.
    """
    x = np.zeros(FEATURES)
    length = log_k(prompt_tokens)
    x[:3] = 1.0, length, length**2
    if earlier is not None:
        x[3:5] = 1.0, earlier
    if task:
        x[5 + crc32(task.encode()) % TASKS] = 1.0
    return x


def log_k(tokens: int) -> float:
    """Natural log of a length in K tokens (1,024). 0 tokens count as 1."""
    return math.log(max(1, tokens) / 1_024)


class LengthPredictor(Bucketed):
    """The `length-predictor` policy: predicts the final context once, at the first turn.

    The policy represents predictors that read the prompt (embeddings), but uses only `features` from token counts. The
    exponential of the predicted log is the median of a log-normal length. The final context of a trajectory is its
    largest context. Before any trajectory has finished, the prediction is the prompt's length.
    """

    NAME = "length-predictor"
    REASON = "bucket by predicted length"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._ridge = Ridge(FEATURES, PENALTY, 2 ** (-1 / HALF_LIFE))
        # For each prompt: number of finished samples, and the sum of their logs. The last updated prompt is last.
        self._prompts: dict[str, tuple[int, float]] = {}
        # Features at the first placement of a live trajectory. Features at its end would include samples of its group
        # that ran at the same time, which a prediction never sees.
        self._asked: dict[str, tuple[int, str, float | None]] = {}

    def finished(self, trajectory: Trajectory) -> None:
        require_finished(trajectory)
        known = self._asked.get(trajectory.id)
        if known is None:  # the trajectory is from a log
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

    def _resume_rule(self, rule: dict[str, Any]) -> None:
        self._ridge.resume(rule["ridge"])
        self._prompts = {id: (count, total) for id, count, total in rule["prompts"]}
        self._asked = {id: (prompt_tokens, task, earlier) for id, prompt_tokens, task, earlier in rule["asked"]}
