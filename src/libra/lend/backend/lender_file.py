"""The configuration of `libra lend serve`: a YAML file.

Invariant: an accepted file describes a loan that its certificate covers. A refusal is one line with the key and the
remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from libra.backends.tiny_model import kv_bytes_per_token
from libra.backends.transport.engine_messages import StartEngine
from libra.config.units import SIZES, quantity
from libra.config.yaml_file import ConfigError, Section, read_section, refusal
from libra.hardware.model_file import load_model
from libra.lend.backend.device_page import EngineFacts, LendingError
from libra.lend.backend.terms import device_loan, terms_of
from libra.lend.certificate import Certificate, ServerLimits, load_certificate
from libra.lend.gate import Slo
from libra.lend.quota import KVLimits, KVView
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingTerms

EXAMPLE = "examples/loan.yaml"

_LONGEST_SOCKET = 107  # bytes of its path, by Linux

_Count = Annotated[int, Field(strict=True, ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


class ServingSection(Section):
    """The server, described by options of its `vllm serve`, and its SLO."""

    model: str
    hardware: str  # as in the certificate, such as "1 x H100"
    ttft: _Seconds
    tpot: _Seconds
    use: Annotated[float, Field(gt=0, le=1)] | None = None  # share of tpot that may be spent; None: as certified


class RolloutSection(Section):
    """The engine that borrows."""

    model: str  # directory with configuration and weights
    max_model_len: _Count
    max_num_seqs: _Count = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # float32 for a CPU without instructions for bfloat16
    kv_cache: str  # memory for KV in addition to the server's, such as 2 GiB
    borrowed_kv: str | None = None  # most KV memory that is borrowed from the server


class LenderFile(Section):
    """Keys of the file. Paths are relative to the file."""

    device: str  # LIBRA_LEND_DEVICE of the server
    certificate: str  # file that `libra lend check` has written
    serving: ServingSection
    rollout: RolloutSection
    listen: str | None = None  # unix socket on which a controller reaches the engine; None: <device>.agent
    shortest_grant: _Seconds = 0.002
    lease: _Seconds = 2.0  # longest time for which a loan outlives this process
    quiet: _Seconds = 5.0  # time inside the envelope before lending resumes
    most_quiet: _Seconds = 300.0  # limit of the doubling of `quiet`
    record: str | None = None  # file for questions and answers
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the speed of its cores, which the device emulates


@dataclass(frozen=True, slots=True)
class LoanOrder:
    """A loan as the file orders it."""

    device: Path
    listen: Path
    model: str  # that the server must serve
    lease: float
    start: StartEngine
    certificate: Certificate | None = None  # None: the limits of the server are not certified

    @property
    def terms(self) -> LendingTerms:
        assert self.start.loan is not None
        return terms_of(self.start.loan)

    @property
    def record(self) -> Path | None:
        """The file of questions and answers."""
        assert self.start.loan is not None
        return None if self.start.loan.record is None else Path(self.start.loan.record)

    def refuse_other(self, facts: EngineFacts) -> None:
        """Raises LendingError if the server is not the certified one."""
        if facts.model != self.model:
            raise LendingError(f"serving.model is {self.model}, but the server on {self.device} serves {facts.model}")
        limits = ServerLimits(facts.max_model_len, facts.max_num_seqs, facts.max_num_batched_tokens)
        if self.certificate is not None and (other := self.certificate.other_limit(limits)) is not None:
            raise LendingError(f"{self.device}: {other}")

    def refuse_memory(self, kv: KVView) -> None:
        """Raises LendingError if the server cannot lend useful KV memory."""
        loan, start = self.start.loan, self.start
        assert loan is not None
        if loan.kv_beside is None:
            return
        if kv.capacity == 0:
            raise LendingError(
                "rollout.borrowed_kv: the serving engine cannot cede KV memory; remove the key, or do what the server's"
                " log says, and restart the server"
            )
        context = start.max_model_len * kv_bytes_per_token(Path(start.model_directory), start.dtype)
        try:
            KVLimits(kv.capacity, kv.reserve, context, start.kv_cache_bytes, self.terms.recall.quiet, loan.kv_beside)
        except ValueError as error:
            raise LendingError(f"rollout.borrowed_kv: {error}") from None


def load_lender_file(path: Path) -> LoanOrder:
    """Read a loan's file and its certificate. Raises ConfigError."""
    file = read_section(path, LenderFile, EXAMPLE)
    certificate = load_certificate(path.parent / file.certificate)
    try:
        return _lender(path.parent, file, certificate)
    except ValueError as error:
        raise refusal(path, str(error)) from None


def _lender(beside: Path, file: LenderFile, certificate: Certificate) -> LoanOrder:
    pace = _pace(file.serving, certificate)
    if not file.shortest_grant <= certificate.longest_grant:
        raise ValueError(
            f"shortest_grant is {file.shortest_grant:g} s, more than the {certificate.longest_grant:g} s that the"
            " certificate grants; lower it"
        )
    if file.most_quiet < file.quiet:
        raise ValueError(f"most_quiet is {file.most_quiet:g} s, less than quiet, {file.quiet:g} s; raise it")
    directory = beside / file.rollout.model
    if not (directory / "config.json").is_file():
        raise ValueError(f"rollout.model: {directory} holds no config.json; give the directory of a model")
    dtype = file.rollout.dtype
    kv_bytes = int(quantity("rollout.kv_cache", file.rollout.kv_cache, SIZES))
    one = file.rollout.max_model_len * kv_bytes_per_token(directory, dtype)
    borrowed = file.rollout.borrowed_kv
    all_kv = kv_bytes if borrowed is None else kv_bytes + int(quantity("rollout.borrowed_kv", borrowed, SIZES))
    if all_kv < one:
        raise ValueError(
            f"rollout.kv_cache is {file.rollout.kv_cache}{'' if borrowed is None else f', borrowed_kv {borrowed}'}; one"
            f" context of max_model_len takes {one / 2**20:.0f} MiB: raise it"
        )
    terms = LendingTerms(
        model=file.serving.model,
        rollout=file.rollout.model,
        pace=pace,
        longest=certificate.longest_grant,
        shortest=file.shortest_grant,
        envelope=certificate.envelope,
        recall=RecallPolicy(file.quiet, file.most_quiet),
        slo=Slo(file.serving.ttft, file.serving.tpot),
    )
    device = beside / file.device
    start = StartEngine(
        model_directory=str(directory),
        max_model_len=file.rollout.max_model_len,
        max_num_seqs=file.rollout.max_num_seqs,
        dtype=dtype,
        kv_cache_bytes=all_kv,
        layout=(),
        buffer_bytes=1,
        seed=0,
        share=1.0,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        refresh_kv=False,
        loan=device_loan(
            str(device),
            terms,
            None if file.record is None else str(beside / file.record),
            file.share,
            None if borrowed is None else kv_bytes,
        ),
    )
    listen = device.with_name(f"{device.name}.agent") if file.listen is None else beside / file.listen
    if (size := len(os.fsencode(listen))) > _LONGEST_SOCKET:
        raise ValueError(
            f"listen: {listen} has {size} bytes, but the path of a socket has at most {_LONGEST_SOCKET}; name a shorter"
            " path"
        )
    if not listen.absolute().parent.is_dir():
        raise ValueError(f"listen: there is no directory {listen.parent}; make it, or name another socket")
    return LoanOrder(device, listen, file.serving.model, file.lease, start, certificate)


def _pace(serving: ServingSection, certificate: Certificate) -> float:
    """The pace (tau). Raises ValueError if the certificate does not cover it."""
    slo = Slo(serving.ttft, serving.tpot)
    try:
        model = load_model(serving.model)
    except ConfigError as error:
        raise ValueError(f"serving.model: {error}") from None
    other = certificate.mismatch(model.name, serving.hardware, slo, model.parameters)
    if other is not None:
        raise ValueError(f"serving: {other}; certify this server with `libra lend check`")
    use = certificate.use if serving.use is None else serving.use
    if use > certificate.use:
        raise ValueError(f"serving.use is {use:g}; the certificate is for {certificate.use:g}: lower it")
    # The certified SLO determines the pace even if the server's own SLO is laxer.
    pace = certificate.slo.pace(use)
    if certificate.longest_step > pace:
        raise ValueError(
            f"serving.use is {use:g}: a serving step may take {1e3 * certificate.longest_step:.0f} ms, the pace is"
            f" {1e3 * pace:.0f} ms; raise use, or lower the server's max_num_batched_tokens and certify it again"
        )
    return pace
