"""The section `lending` of a run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from libra.config.run import LendingRule, ModelConfig, ShapeConfig
from libra.config.yaml_file import Section


class ServerConfig(Section):
    """A server of another model, under recorded traffic: vLLM as `vllm serve` runs it, without the HTTP."""

    model: ModelConfig = ModelConfig()  # a tiny model has random weights
    max_model_len: PositiveInt = 512
    max_num_seqs: PositiveInt = 32
    max_num_batched_tokens: PositiveInt = 64
    kv_tokens: PositiveInt = 8192
    traffic: Path  # requests, as for `libra simulate --requests`; relative to the configuration
    speed: PositiveFloat = 1.0  # requests arrive this many times as fast as recorded
    shorter: PositiveFloat = 1.0  # divisor of the lengths of prompts and outputs


class PublicationConfig(Section):
    """The address at which agents follow the weights of a run."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)  # 0: any free port


class LendingConfig(Section):
    """Devices that a run borrows for rollouts from servers: from agents (`libra lend serve`), and from servers that
    the run starts, with one device each. The keys from `server` to `quiet` apply to the latter. Times are seconds."""

    agents: tuple[Path, ...] = ()  # their sockets, relative to the configuration
    weights: PublicationConfig = PublicationConfig()
    servers: int = Field(default=0, ge=0)
    server: ServerConfig | None = None
    ttft: PositiveFloat | None = None  # SLO: to the first token
    tpot: PositiveFloat | None = None  # SLO: a token after it
    use: float = Field(default=0.8, gt=0, le=1)  # share of `tpot` that may be spent
    longest_grant: PositiveFloat = 0.05
    shortest_grant: PositiveFloat = 0.004
    requests_per_second: PositiveFloat = 100.0  # rate at one server above which it lends nothing
    window: PositiveFloat = 2.0  # time over which this rate is counted
    quiet: PositiveFloat = 1.0  # time below this rate before lending resumes; doubled if the next recall follows soon
    rule: LendingRule = "gate"  # off: nothing is lent; the others are baselines
    engine: ShapeConfig  # rollout engine on a lent device; an agent's engine may be larger

    @property
    def objective(self) -> tuple[float, float]:
        """`ttft` and `tpot` of a run that starts servers."""
        assert self.ttft is not None and self.tpot is not None
        return self.ttft, self.tpot

    @property
    def devices(self) -> int:
        """Number of lent devices, of servers and of agents."""
        return self.servers + len(self.agents)

    @model_validator(mode="after")
    def _there_are_lenders(self) -> Self:
        if not self.devices:
            raise ValueError("no device is lent: name agents, or set servers to 1 or more")
        missing = [key for key in ("server", "ttft", "tpot") if getattr(self, key) is None]
        if self.servers and missing:
            raise ValueError(f"servers is {self.servers}: give {' and '.join(missing)}, too")
        if len(set(self.agents)) < len(self.agents):
            raise ValueError("agents names a socket twice; name each once")
        if self.agents and self.rule not in ("gate", "off"):
            raise ValueError(f"rule is {self.rule}: agents lend by their own gate; give gate, or off")
        return self

    @model_validator(mode="after")
    def _grants_are_possible(self) -> Self:
        if self.shortest_grant > self.longest_grant:
            raise ValueError(
                f"shortest_grant is {self.shortest_grant:g} s, longest_grant {self.longest_grant:g} s: lower the first"
            )
        return self

    def require_shorter(self, longest: int) -> None:
        holds = min(self.engine.max_model_len, self.engine.kv_tokens)
        if holds >= longest:
            raise ValueError(
                f"lending.engine holds {holds} tokens: give fewer than {longest}, so that engines of your own serve the"
                " longest contexts while nothing is lent"
            )

    def beside(self, folder: Path) -> Self:
        server = self.server
        if server is not None:
            server = server.model_copy(update={"traffic": folder / server.traffic})
        return self.model_copy(update={"server": server, "agents": tuple(folder / agent for agent in self.agents)})
