"""The menu: the settings that a search tries.

Invariant: an invalid menu file is refused in one line that names the key. Each candidate comes once, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Annotated, NoReturn, Self

from pydantic import Field, model_validator

from libra.config.yaml_file import Section, read_section
from libra.cost.afd import afd_refusal
from libra.cost.collectives import AllToAll
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import Cluster
from libra.hardware.model import ModelSpec
from libra.plan.problem import InfeasiblePlanError
from libra.serving.candidate import Apart, Architecture, DataParallel, Drafts, EnginePool, EngineSetup, ServingCandidate
from libra.serving.engines import tiers_for
from libra.serving.question import MOST_PRICE, SizingQuestion
from libra.sim.described_tiers import DescribedTier
from libra.sim.engines_keys import KVTierSection, SpeculativeSection

_Count = Annotated[int, Field(strict=True, ge=1)]
_Counts = Annotated[tuple[_Count, ...], Field(min_length=1)]
_Price = Annotated[float, Field(gt=0, le=MOST_PRICE)]
_Tiers = Annotated[tuple[KVTierSection, ...], Field(min_length=1)]  # the nearest first
# Numbers of engines of a pool that the search tries; above 8 in steps of about a quarter of an octave.
COUNTS = (*range(1, 9), *(base << octave for octave in range(1, 9) for base in (5, 6, 7, 8)))


class AfdMenu(Section):
    """Sizes of an engine with attention and FFN on separate GPUs. The search tries each pair in which one number of
    ranks is a multiple of the other, and the FFN ranks divide the experts.
    """

    attention: _Counts = (8, 16, 32)
    ffn: _Counts = (8, 16)
    micro_batches: _Counts = (2, 3)


class MenuFile(Section):
    """The keys of a menu file, with vLLM's names. A missing key has the default below; null means all possible
    values.
    """

    architectures: Annotated[tuple[Architecture, ...], Field(min_length=1)] = ("colocated", "prefill-decode")
    nodes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # classes of nodes
    tensor_parallel_size: _Counts | None = None
    pipeline_parallel_size: _Counts = (1,)
    max_num_seqs: _Counts = (64, 256)
    max_num_batched_tokens: _Counts = (2048, 8192)
    async_scheduling: Annotated[tuple[Annotated[bool, Field(strict=True)], ...], Field(min_length=1)] = (True,)
    data_parallel_size: _Counts = (1,)  # with more than one, experts are divided over the ranks
    all2all_backend: Annotated[tuple[AllToAll, ...], Field(min_length=1)] = ("allgather_reducescatter",)
    speculative: Annotated[tuple[SpeculativeSection | None, ...], Field(min_length=1)] = (None,)  # null: no drafts
    kv_tiers: Annotated[tuple[_Tiers | None, ...], Field(min_length=1)] = (None,)  # null: none
    engines: _Counts | None = None  # of a pool
    afd: AfdMenu = AfdMenu()
    cost_per_hour: dict[str, _Price] = Field(default_factory=dict)  # of a GPU, by class of nodes

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if "afd" in self.model_fields_set and "attention-ffn" not in self.architectures:
            raise ValueError("afd is given, but architectures lacks attention-ffn: add attention-ffn, or leave afd out")
        return self

    def cluster(self, given: Cluster) -> Cluster:
        """The cluster with only the menu's node classes. Raises ValueError if the cluster lacks such a class, or if a
        price is for a class outside the menu.
        """
        try:
            taken = (
                given
                if self.nodes is None
                else replace(given, nodes=tuple(map(given.node_class, dict.fromkeys(self.nodes))))
            )
        except ValueError as error:
            raise ValueError(f"nodes of the menu: {error}") from None
        names = [nodes.name for nodes in taken.nodes]
        for name in self.cost_per_hour:
            try:
                given.node_class(name)
            except ValueError as error:
                raise ValueError(f"cost_per_hour of the menu: {error}") from None
            if name not in names:
                raise ValueError(
                    f"cost_per_hour of the menu prices {name}, which is not in its nodes: remove the price, or add"
                    f" {name} to nodes"
                )
        return taken

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the draft models."""
        return tuple(dict.fromkeys(it.model for it in self.speculative if it is not None and it.model is not None))

    def drafts(self) -> list[Drafts | None]:
        """The entries of `speculative`. Raises ValueError that names a wrong entry."""
        made: list[Drafts | None] = []
        for place, given in enumerate(self.speculative):
            try:
                made.append(None if given is None else Drafts(given.drafts(), given.model))
            except ValueError as error:
                raise ValueError(f"speculative.{place} of the menu: {error}") from None
        return made

    def tiers(self) -> list[tuple[DescribedTier, ...]]:
        """The entries of `kv_tiers`. Raises ValueError that names a wrong entry."""
        for place, given in enumerate(self.kv_tiers):
            for number, it in enumerate(given or ()):
                if it.shared:
                    raise ValueError(
                        f"kv_tiers.{place}.{number}.shared of the menu: a search supports no shared tiers; leave it out"
                    )
        return [tuple(it.described() for it in given or ()) for given in self.kv_tiers]


DEFAULT = MenuFile()
_MOST = 2_000  # most shapes of engines; the number of prefill/decode pairs grows with the square


def load_menu(path: Path) -> MenuFile:
    """Read a file such as `examples/menu.yaml`. Raises `ConfigError`."""
    return read_section(path, MenuFile, "examples/menu.yaml")


@dataclass(frozen=True, slots=True)
class ServingMenu:
    """Candidates of one question."""

    file: MenuFile = DEFAULT

    def candidates(self, question: SizingQuestion) -> Iterator[ServingCandidate]:
        """Yield the candidates within GPUs and budget. With a given rate, pools have every number of engines. Without
        one, pools have only the largest possible number, since the rate per GPU hardly depends on it. Raises ValueError
        if the file names values that the cluster or the profiles lack."""
        file = self.file
        shapes = self.shapes(question)
        if "colocated" in file.architectures:
            for shape in shapes:
                yield from self._colocated(question, shape)
        if "prefill-decode" in file.architectures:
            prefill, decode = self._roles(shapes)
            for one, other in product(prefill, decode):
                if one.drafts == other.drafts:  # the drafter needs KV of the prompt, too
                    yield from self._apart(question, one, other)
        if "attention-ffn" in file.architectures:
            prefill, decode = self._roles([it for it in shapes if it.drafts is None])
            groups = [it for it in decode if it.parallel is None]
            for one, other, apart in product(prefill, groups, self._groups(question.model)):
                yield from self._apart(question, one, replace(other, apart=apart))

    def _roles(self, shapes: list[EngineSetup]) -> tuple[list[EngineSetup], list[EngineSetup]]:
        """(shapes of prefill engines, shapes of decode engines). Prefill engines run few requests at a time, so only
        the largest `max_num_seqs` counts. Decode engines have few prompt tokens, so only the largest
        `max_num_batched_tokens` counts. Decode engines have no pipeline, since vLLM does not pull KV into one, and no
        tiers, since they pull whole prompts."""
        seqs, tokens = max(self.file.max_num_seqs), max(self.file.max_num_batched_tokens)
        prefill = dict.fromkeys(replace(it, max_num_seqs=seqs) for it in shapes)
        decode = dict.fromkeys(
            replace(it, max_num_batched_tokens=tokens, kv_tiers=()) for it in shapes if it.pipeline_parallel_size == 1
        )
        return list(prefill), list(decode)

    def _groups(self, model: ModelSpec) -> list[Apart]:
        """The menu's groups that can divide the model. Raises ValueError if no group can."""
        pairs = list(product(self.file.afd.attention, self.file.afd.ffn, self.file.afd.micro_batches))
        refusals = [afd_refusal(model, *it) for it in pairs]
        found = [Apart(*it) for it, refused in zip(pairs, refusals, strict=True) if refused is None]
        if not found:
            raise ValueError(f"attention-ffn of the menu: {refusals[0]}")
        return list(dict.fromkeys(found))

    def shapes(self, question: SizingQuestion) -> list[EngineSetup]:
        """The engine settings without duplicates. Raises ValueError if there are too many."""
        found = list(dict.fromkeys(islice(self._shapes(question), 10 * _MOST)))
        if len(found) > _MOST:
            raise ValueError(
                f"the menu has more than {_MOST:,} engine settings: list fewer values of max_num_seqs,"
                " max_num_batched_tokens and other keys"
            )
        return found

    def _shapes(self, question: SizingQuestion) -> Iterator[EngineSetup]:
        file, cluster = self.file, question.cluster
        names = [nodes.name for nodes in cluster.nodes] if file.nodes is None else file.nodes
        there_are = {grid.tp for profile in question.profiles for grid in profile.engines}
        for tp in file.tensor_parallel_size or ():
            if tp not in there_are:
                raise ValueError(
                    f"tensor_parallel_size {tp} of the menu: {question.model.name} has engine times for"
                    f" {', '.join(map(str, sorted(there_are)))} on this cluster; leave it out"
                )
        drafts, tiers = file.drafts(), file.tiers()
        several = [dp for dp in file.data_parallel_size if dp > 1]
        if several and question.model.experts is None:
            raise ValueError(
                f"data_parallel_size {several[0]} of the menu: {question.model.name} has no experts to divide; leave it"
                " out"
            )
        for name in names:
            nodes = cluster.node_class(name)
            profile = question.profiles[cluster.nodes.index(nodes)]
            known = tuple(grid.tp for grid in profile.engines)
            degrees = known if file.tensor_parallel_size is None else file.tensor_parallel_size
            self._check_reach(question.model, profile, degrees)
            for (place, kept), tp in product(enumerate(tiers), degrees):
                tiers_for(question, EngineSetup(name, tp, 1, 1, 1, False, kv_tiers=kept), f"kv_tiers.{place}")
            for tp, pp, seqs, tokens, ahead, draft, kept in product(
                degrees,
                file.pipeline_parallel_size,
                file.max_num_seqs,
                file.max_num_batched_tokens,
                file.async_scheduling,
                drafts,
                tiers,
            ):
                if 1 not in file.data_parallel_size or tp not in known or tokens < seqs or (draft and pp > 1):
                    continue
                ahead = ahead and _may_be_ahead(pp, draft)
                its = kept if pp == 1 else ()
                yield EngineSetup(name, tp, pp, seqs, tokens, ahead, drafts=draft, kv_tiers=its)
            for tp, seqs, tokens, ahead, dp, way, draft in product(
                degrees,
                file.max_num_seqs,
                file.max_num_batched_tokens,
                file.async_scheduling,
                several,
                file.all2all_backend,
                drafts,
            ):
                experts = question.model.experts
                if tp in known and tokens >= seqs and experts is not None and experts.count % (dp * tp) == 0:
                    asynchronous, ranks = ahead and _may_be_ahead(1, draft), DataParallel(dp, way)
                    yield EngineSetup(name, tp, 1, seqs, tokens, asynchronous, parallel=ranks, drafts=draft)

    def _check_reach(self, model: ModelSpec, profile: EngineProfile, degrees: Sequence[int]) -> None:
        """Raise ValueError if the menu has larger batches than the profile has times for."""
        grids = [it for it in profile.engines if it.tp in degrees]
        for key, given, reach in (
            ("max_num_seqs", self.file.max_num_seqs, [it.most_sequences for it in grids]),
            ("max_num_batched_tokens", self.file.max_num_batched_tokens, [it.most_tokens for it in grids]),
        ):
            if reach and max(given) > min(reach):
                raise ValueError(
                    f"{key} {max(given)} of the menu: {model.name} has engine times up to {min(reach):,}; lower it"
                )

    def _counts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.file.engines or COUNTS)))

    def _colocated(self, question: SizingQuestion, shape: EngineSetup) -> Iterator[ServingCandidate]:
        fitting = [
            it
            for it in (ServingCandidate((EnginePool("colocated", shape, n),)) for n in self._counts())
            if _fits(question, it)
        ]
        yield from fitting if question.rate is not None else fitting[-1:]

    def _apart(self, question: SizingQuestion, prefill: EngineSetup, decode: EngineSetup) -> Iterator[ServingCandidate]:
        for some in self._counts():
            pairs = (
                ServingCandidate((EnginePool("prefill", prefill, some), EnginePool("decode", decode, n)))
                for n in self._counts()
            )
            fitting = [it for it in pairs if _fits(question, it)]
            if not fitting:
                return
            yield from fitting if question.rate is not None else fitting[-1:]


def _may_be_ahead(stages: int, drafts: Drafts | None) -> bool:
    """Whether engines with these stages and drafts may schedule asynchronously."""
    return stages == 1 and (drafts is None or drafts.speculative.method != "ngram")


def _fits(question: SizingQuestion, candidate: ServingCandidate) -> bool:
    return question.refusal(candidate) is None


def refuse_empty(question: SizingQuestion, menu: ServingMenu) -> NoReturn:
    """Raise the reason why the menu has no candidate for the question: `InfeasiblePlanError` if more GPUs or a larger
    budget would allow one, otherwise ValueError."""
    more = list(menu.candidates(replace(question, gpus=None, budget=None, rate=1.0)))  # with a rate: all pool sizes
    if not more:
        raise ValueError(
            "no engine of the menu fits this cluster: engines with a pipeline must not have drafts or be decode"
            " engines, max_num_batched_tokens must be max_num_seqs or more, data_parallel_size x tensor_parallel_size"
            " must divide the experts, and the cluster must have the GPUs of all `engines`"
        )
    raise _nothing_so_small(question, more)


def refuse_too_dear(question: SizingQuestion, menu: ServingMenu) -> None:
    """Raise `InfeasiblePlanError` if GPUs or budget are too few for any single engine of the menu."""
    singles = [ServingCandidate((EnginePool("colocated", it, 1),)) for it in menu.shapes(question)]
    if singles and not any(_fits(question, it) for it in singles):
        raise _nothing_so_small(question, singles)


def _nothing_so_small(question: SizingQuestion, candidates: Sequence[ServingCandidate]) -> InfeasiblePlanError:
    least = min(candidates, key=question.cost)
    return InfeasiblePlanError(
        f"no engine of the menu fits: {least} {question.refusal(least)}; raise gpus or budget, or add smaller engines"
    )
