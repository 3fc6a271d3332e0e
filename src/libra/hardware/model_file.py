"""Shapes of models by name, or from a Hugging Face config.json.

Invariant: a configuration is read completely or refused. The error for a missing field, an unknown family or an
unsupported part names the field. Defaults come from the family's class (`libra.hardware.families.known`). A note names
unread fields that may change the shape. `quantization_config` describes the stored weights
(`libra.hardware.checkpoint_file`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from libra.config.input_file import read_input
from libra.config.yaml_file import ConfigError, nearest, refusal, shown, unknown
from libra.hardware.checkpoint_file import stored_weights
from libra.hardware.families.fields import Fields
from libra.hardware.families.known import FAMILIES, WRAPPED
from libra.hardware.families.shape import by_shape
from libra.hardware.families.stack import Family
from libra.hardware.families.towers import tower_parameters
from libra.hardware.model import ModelSpec, arranged

_WRAPPERS = ("text_config", "language_config", "llm_config", "thinker_config")
_GENERATING = ("ForCausalLM", "ForConditionalGeneration")  # name endings of classes that predict tokens
Note = Callable[[str], None]


def _silent(text: str) -> None:
    pass


def load_model(path_or_name: str | Path, note: Note = _silent) -> ModelSpec:
    """Load a model's shape from a config.json, a directory with a config.json, or the name of a known model
    (`model_names`).

    Files take precedence over names. Names ignore case, and may omit the organisation. `note` is called with a line for
    each part of the file that is not read. Raises `ConfigError`.
    """
    path = Path(path_or_name)
    if path.is_dir():
        path /= "config.json"
    elif not path.exists() and path.suffix != ".json":
        return _from_library(str(path_or_name), note)
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    try:
        text = read_input(path).decode()
    except OSError as error:
        raise refusal(path, f"{error.strerror}: give an existing config.json, or a directory with one") from None
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8 text (byte {error.start}): give a config.json") from None
    return _parse(text, path, name, note)


def model_names() -> tuple[str, ...]:
    """The known models, whose shapes ship with Libra, such as `Qwen/Qwen3-14B`."""
    entries = (files("libra.hardware") / "models").iterdir()
    return tuple(sorted(_name_of(entry.name) for entry in entries if entry.name.endswith(".json")))


def _name_of(file: str) -> str:
    return file.removesuffix(".json").replace("--", "/")


def _from_library(given: str, note: Note) -> ModelSpec:
    names = model_names()
    by_name = {name.casefold(): name for name in names} | {_short(name): name for name in names}
    name = by_name.get(given.casefold())
    if name is None:
        same = [name for name in by_name if _numbers(name) == _numbers(_short(given))]
        close = nearest(_short(given), same)
        hint = f"did you mean {by_name[close]}? Known are" if close else "known are"
        raise ConfigError(
            f"{shown(given)}: no such file or known model; {hint} {', '.join(names)}; for another model, give its "
            f"config.json"
        )
    file = f"{name.replace('/', '--')}.json"
    text = (files("libra.hardware") / "models" / file).read_text(encoding="utf-8")
    return _parse(text, Path(file), name, note)


def _short(name: str) -> str:
    """The name without its organisation, in lower case."""
    return name.rpartition("/")[2].casefold()


def _numbers(name: str) -> list[str]:
    """Version and sizes in a name. Names with different numbers are different models, not other spellings."""
    return re.findall(r"\d+(?:\.\d+)?", name)


def _parse(text: str, path: Path, name: str, note: Note) -> ModelSpec:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise refusal(path, "expected a JSON object, the config.json of a model")
    try:
        top = Fields(data)
        spec = _spec(top, name, note)
        for text in _unread(top):
            note(f"{name}: {text}")
        given = _quantization(data)
        given = _beside(path) if given is None else given
        return spec if given is None else replace(spec, stored=stored_weights(given, spec))
    except ValueError as error:
        raise refusal(path, str(error)) from None


def _unread(top: Fields) -> Iterator[str]:
    """Notes on unread fields that may change the shape, and on absent fields with their assumed values."""
    unread, assumed = list(top.unread()), [f"{field} {value}" for field, value in top.assumed()]
    if unread:
        yield f"fields not read: {', '.join(unread)}; compare the number of parameters: these may change the shape"
    if assumed:
        yield f"absent fields, with assumed values: {', '.join(assumed)}"


# Fields of a configuration from which an attribute of a layer's part is read.
_GIVEN_BY = {
    "active": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    "groups": ("n_group", "num_expert_group", "n_groups", "mamba_n_groups"),
    "intermediate": ("moe_intermediate_size", "intermediate_size"),
    "key_heads": ("linear_num_key_heads",),
}


def _of_field(text: str, fields: Fields) -> str:
    """Turn an error of a layer's part, which names its own attribute, into an error that begins with the field of the
    file.
    """
    if re.match(r"[\w.]+: ", text):
        return text
    given = (name for name in _GIVEN_BY.get(text.partition(" ")[0], ()) if fields.given(name))
    return f"{fields.path}{next(given, 'model_type')}: {text}"


def _quantization(data: dict[str, object]) -> object:
    """The value of `quantization_config`, in the file or in its wrapped configuration. DeepSeek-V4 has the type of its
    experts in a separate field.
    """
    inside = (data.get(field) for field in _WRAPPERS)
    every = (data, *(it for it in inside if isinstance(it, dict)))
    found = next((it["quantization_config"] for it in every if it.get("quantization_config") is not None), None)
    experts = data.get("expert_dtype")
    return {**found, "expert_dtype": experts} if isinstance(found, dict) and experts is not None else found


def _beside(path: Path) -> object:
    """ModelOpt's quantisation from `hf_quant_config.json`, next to an older config.json or to one with a prefix in its
    name; None without this file.
    """
    file = path.with_name(f"{path.name.removesuffix('config.json')}hf_quant_config.json")
    if not path.name.endswith("config.json") or not file.is_file():
        return None
    try:
        data = json.loads(read_input(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: {error}; give ModelOpt's file, or remove it") from None
    return data.get("quantization") if isinstance(data, dict) else data


def _spec(top: Fields, name: str, note: Note) -> ModelSpec:
    fields, inner = top, None
    while (inside := next((found for it in _WRAPPERS if (found := fields.part(it)) is not None), None)) is not None:
        top, fields = fields, inside
        inner = fields.value("model_type")

    def tell(text: str) -> None:
        note(f"{name}: {text}")

    family = _family(top, fields, top.value("model_type"), inner, tell)
    fields.with_defaults(family.defaults)
    try:
        stack = family.read(fields)
    except ValueError as error:
        raise ValueError(_of_field(str(error), fields)) from None
    kinds, order = arranged(stack.layers)
    tied = "tie_word_embeddings"
    above = top.flag(tied) if fields is not top and top.given(tied) else None
    hidden = fields.count("hidden_size")
    spec = ModelSpec(
        name=name,
        hidden=hidden,
        vocab=fields.count("vocab_size"),
        tied=fields.flag(tied) if above is None else above,
        max_context=fields.count(fields.first("max_position_embeddings", "model_max_length", "max_sequence_length")),
        kinds=kinds,
        order=order,
        tower=tower_parameters(top, hidden, tell),
        other=stack.other,
    )
    unread = None if family.known else next(fields.unread(), None)
    if unread is not None:
        raise ValueError(
            f"{unread}: this field may change the shape, but its meaning in an unknown family is unclear, so the "
            f"model is not supported"
        )
    return spec


def _family(top: Fields, fields: Fields, kind: object, inner: object, note: Note) -> Family:
    """The family of the configuration `fields`; `inner` is its name if it is inside a wrapper."""
    architectures = fields.names("architectures")
    named = inner if inner is not None else WRAPPED.get(kind, kind) if isinstance(kind, str) else kind
    if named is None and not architectures:
        raise fields.error("model_type", "this field is required; add it")
    if named is None:
        by_architecture = {it: family for family in FAMILIES.values() for it in family.architectures}
        if architectures[0] not in by_architecture:
            raise fields.error("architectures", unknown("architecture", architectures[0], by_architecture))
        return by_architecture[architectures[0]]
    if not isinstance(named, str):
        raise fields.error("model_type", f"expected a name (got {shown(named)})")
    if named not in FAMILIES:
        shaped = by_shape(fields)
        if shaped is None:
            raise fields.error("model_type", unknown("architecture", named, FAMILIES))
        note(f"the family {named} is unknown: read by its fields; norms and biases may be missing")
        return shaped
    family = FAMILIES[named]
    if architectures and not any(it.endswith(_GENERATING) for it in architectures):
        known = " or ".join(_GENERATING)
        raise fields.error(
            "architectures", f"{shown(architectures[0])} does not predict tokens; only classes {known} are supported"
        )
    return family
