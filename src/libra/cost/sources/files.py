"""Engine profiles, calibrations, fits of engines and measured device profiles as JSON files.

Invariant: a saved value is loaded unchanged. A manually changed file or a wrong field is refused, with the field's
name.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from libra.config.input_file import read_input
from libra.config.yaml_file import ConfigError
from libra.cost.device import DeviceProfile
from libra.cost.grid import EngineProfile
from libra.cost.sources.engine_fit import EngineFit
from libra.cost.sources.rates import Calibration

T = TypeVar("T", EngineProfile, Calibration, DeviceProfile, EngineFit)


def save_grid(path: Path, profile: EngineProfile) -> None:
    """Write the profile and its digest to a file atomically."""
    _write(path, _json({"digest": profile.digest, "profile": asdict(profile)}))


def load_grid(path: Path) -> EngineProfile:
    """Read a profile. Raises `ConfigError` naming the file and the field, or a mismatch of values and digest."""
    remedy = "make the profile again"
    content = _read(path, remedy)
    if not isinstance(content, dict) or set(content) != {"digest", "profile"}:
        raise ConfigError(f"{path}: a profile file has the keys digest and profile, and no others; {remedy}")
    profile = _checked(path, EngineProfile, content["profile"], remedy)
    if profile.digest != content["digest"]:
        raise ConfigError(f"{path}: digest is {content['digest']}, the values have {profile.digest}; {remedy}")
    return profile


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration to a file atomically."""
    _write(path, _json(asdict(calibration)))


def load_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises `ConfigError` naming the file and the field."""
    remedy = "calibrate again, or give auto, tables or roofline"
    return _checked(path, Calibration, _read(path, remedy), remedy)


def save_fit(path: Path, fit: EngineFit) -> None:
    """Write a host and corrections of kernels to a file atomically."""
    _write(path, _json(asdict(fit)))


def load_fit(path: Path) -> EngineFit:
    """Read the file of `save_fit`. Raises `ConfigError` naming the file and the field."""
    remedy = "fit the engine again, or give none, default or fast"
    return _checked(path, EngineFit, _read(path, remedy), remedy)


def save_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a run's measurements to a file atomically."""
    _write(path, TypeAdapter(DeviceProfile).dump_json(profile, indent=1) + b"\n")


def load_profile(path: Path) -> DeviceProfile:
    """Read a run's measurements. Raises `ConfigError` naming the file and the field."""
    remedy = "give a profile.json that a run has written"
    return _checked(path, DeviceProfile, _read(path, remedy), remedy)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_bytes(content)
    part.rename(path)


def _read(path: Path, remedy: str) -> Any:
    try:
        return json.loads(read_input(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {remedy}, or give another file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); {remedy}") from None


def _checked(path: Path, kind: type[T], content: Any, remedy: str) -> T:
    adapter = TypeAdapter(kind)
    try:
        value = adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(f"{path}: {field}: {first['msg']}; {remedy}") from None
    unknown = _unknown(content, json.loads(adapter.dump_json(value)))
    if unknown:
        raise ConfigError(f"{path}: {unknown}: unknown field; {remedy}")
    return value


def _unknown(content: Any, known: Any) -> str:
    """Path of the first key in `content` that `known` lacks; empty without such a key."""
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
