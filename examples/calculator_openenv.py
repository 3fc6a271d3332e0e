"""Sums with a calculator, as an OpenEnv server: `python examples/calculator_openenv.py [PORT]`, after
`pip install openenv-core` in an environment of its own."""

import random
import re
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Written(Action):
    answer: str  # `>12+34` asks the calculator, `A46` is the answer


class Read(Observation):
    text: str


class Sums(Environment[Written, Read, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Read:
        rng = random.Random(seed)
        terms = [rng.randint(1, 99) for _ in range(rng.randint(2, 4))]
        self.right = f"A{sum(terms)}"
        return Read(text="Q" + "+".join(map(str, terms)))

    def step(self, action: Written) -> Read:
        call = re.fullmatch(r">(\d+)\+(\d+)", action.answer)
        if call:
            return Read(text=f"={int(call[1]) + int(call[2])}")
        if action.answer.startswith(">"):
            return Read(text="=?")
        return Read(text="", done=True, reward=float(action.answer == self.right))


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(create_fastapi_app(Sums, Written, Read, max_concurrent_envs=64), host="127.0.0.1", port=port)
