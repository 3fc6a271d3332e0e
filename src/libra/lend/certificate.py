"""Certificates: the proven loan of a lender, the only loan that a planner may use.

Invariant: a certificate holds for one model on one kind of device under one SLO, and for loads inside its envelope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from libra.config.input_file import MOST, beyond_floats, read_input
from libra.config.yaml_file import ConfigError
from libra.lend.gate import Slo
from libra.lend.traffic.envelope import Envelope


@dataclass(frozen=True, slots=True)
class Harvest:
    """The share that is lent at one rate of traffic."""

    rate: float  # requests/s, the mean of the replay
    share: float  # of the device's time, lent to a borrower that spends every grant


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the serving engine, by vLLM's names."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of a replay of `traffic`. Its borrower used every grant to the end, and lending made no request miss
    its SLO.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str
    hardware: str  # such as "1 x H100"
    slo: Slo
    use: float  # share of `slo.tpot` that serving may be slowed down to
    longest_grant: float  # seconds (B)
    longest_step: float  # seconds (C): bound of a serving step inside the envelope
    envelope: Envelope
    harvest: tuple[Harvest, ...]  # by rising rate; the last is the certified load
    traffic: str  # the file that was replayed
    requests: int
    missed_alone: int  # requests of the certified load that miss the SLO without lending, too
    parameters: int | None = None  # of the model, as names are not unique; None: in older certificates
    limits: ServerLimits | None = None  # under which steps and queue were bounded; None: in older certificates

    def __post_init__(self) -> None:
        self.slo.pace(self.use)
        if not self.harvest:
            raise ValueError("harvest is empty; a certificate says what is lent at one rate or more")
        if any(low.rate >= high.rate for low, high in pairwise(self.harvest)):
            raise ValueError("harvest is not in the order of rising rates; write the certificate again")
        if not all(0 <= row.share <= 1 for row in self.harvest):
            raise ValueError("harvest has a share outside 0 to 1; write the certificate again")

    @property
    def rate(self) -> float:
        """Requests/s of the certified load."""
        return self.harvest[-1].rate

    @property
    def covered(self) -> float:
        """Requests/s up to which the certificate applies: the certified load, or the rate of the replay's busiest
        minute if that rate is lower. The latter is the case for traces of less than a minute."""
        return min(self.rate, self.envelope.rate)

    def share_at(self, rate: float) -> float:
        """Share of the device that is lent at `rate`; 0 above `covered`. Between two certified rates, the share at the
        higher rate, since load reduces the lent share.
        """
        if rate > self.covered:
            return 0.0
        return next((row.share for row in self.harvest if rate <= row.rate), 0.0)

    def mismatch(self, model: str, hardware: str, slo: Slo, parameters: int | None = None) -> str | None:
        """Reason why the certificate does not apply to a lender; None if it does. A certificate also covers laxer SLOs.
        `parameters` is the model's number of parameters; None: unknown."""
        if model != self.model:
            return f"the certificate is for {self.model}, not for {model}"
        if parameters is not None and self.parameters not in (None, parameters):
            return f"the certificate is for a {model} of {self.parameters:,} parameters, not of {parameters:,}"
        if hardware != self.hardware:
            return f"the certificate is for {self.hardware}, not for {hardware}"
        for name in ("ttft", "tpot"):
            if getattr(slo, name) < getattr(self.slo, name):
                return f"{name} is {getattr(slo, name):g} s; the certificate is for {getattr(self.slo, name):g} s"
        return None

    def other_limit(self, limits: ServerLimits) -> str | None:
        """Reason why the certificate does not apply to a server with these limits, with the remedy; None if it does.

        The limits on a step's tokens and requests bound its time and, with that, the waiting prompts. A shorter
        `max_model_len` changes neither.
        """
        if self.limits is None:
            return None
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            here, certified = getattr(limits, name), getattr(self.limits, name)
            if here > certified or (here < certified and name != "max_model_len"):
                return (
                    f"{name} is {here} at the server and {certified} in the certificate; start the server with"
                    f" --{name.replace('_', '-')} {certified}, or certify the server with `libra lend check`"
                )
        return None


@cache
def _certificates() -> TypeAdapter[Certificate]:
    return TypeAdapter(Certificate)


def certificate_json(certificate: Certificate) -> str:
    return _certificates().dump_json(certificate, indent=1).decode() + "\n"


def load_certificate(path: Path) -> Certificate:
    """Read a certificate. Raises `ConfigError` that names the file and the field."""
    try:
        certificate = _certificates().validate_json(read_input(path), strict=True)
        if beyond_floats(asdict(certificate)):
            raise ConfigError(f"{path}: a whole number exceeds {MOST}; have the certificate made again")
        return certificate
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a certificate that `libra lend check` has written") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(
            f"{path}: {field}: {first['msg']}; give a certificate that `libra lend check` has written"
        ) from None


def best(certificates: Sequence[Certificate], rate: float) -> Certificate:
    """The certificate that lends most at `rate`; among equals, the certificate with the lowest `use`."""
    return max(certificates, key=lambda it: (it.share_at(rate), -it.use))
