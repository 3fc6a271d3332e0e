"""Engine profiles and calibrations as JSON files.

Invariant: what was saved is loaded equal, byte for byte the same when saved again; a file that was changed by hand, or
is not exactly what it should be, is refused with the field's name.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from libra.config.yaml_file import ConfigError
from libra.cost.grid import EngineProfile
from libra.cost.sources.rates import Calibration

T = TypeVar("T", EngineProfile, Calibration)


@cache
def _profiles() -> TypeAdapter[EngineProfile]:
    return TypeAdapter(EngineProfile)


@cache
def _calibrations() -> TypeAdapter[Calibration]:
    return TypeAdapter(Calibration)


def save_grid(path: Path, profile: EngineProfile) -> None:
    """Write the profile and its digest: the file whole, or not at all."""
    _write(path, {"digest": profile.digest, "profile": asdict(profile)})


def load_grid(path: Path) -> EngineProfile:
    """Read a profile. Raises `ConfigError` naming the file and the field, or that the values are not the digest's."""
    remedy = "make the profile again"
    content = _read(path, remedy)
    if not isinstance(content, dict) or set(content) != {"digest", "profile"}:
        raise ConfigError(f"{path}: a profile file has digest and profile, nothing else; {remedy}")
    profile = _checked(path, _profiles(), content["profile"], remedy)
    if profile.digest != content["digest"]:
        raise ConfigError(f"{path}: digest is {content['digest']}, the values have {profile.digest}; {remedy}")
    return profile


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file whole, or not at all."""
    _write(path, asdict(calibration))


def load_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises `ConfigError` naming the file and the field."""
    remedy = "calibrate again"
    return _checked(path, _calibrations(), _read(path, remedy), remedy)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.rename(path)


def _read(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {remedy}, or give another file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); {remedy}") from None


def _checked(path: Path, adapter: TypeAdapter[T], content: Any, remedy: str) -> T:
    try:
        value = adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(f"{path}: {field}: {first['msg']}; {remedy}") from None
    unknown = _unknown(content, json.loads(adapter.dump_json(value)))
    if unknown:
        raise ConfigError(f"{path}: {unknown}: not a field of it; {remedy}")
    return value


def _unknown(content: Any, known: Any) -> str:
    """Where `content` has a key that `known` has not: its path, or nothing."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in known:
                return str(key)
            if inner := _unknown(value, known[key]):
                return f"{key}.{inner}"
    if isinstance(content, list):
        for index, value in enumerate(content):
            if inner := _unknown(value, known[index]):
                return f"{index}.{inner}"
    return ""
