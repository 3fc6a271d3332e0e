"""A measured `DeviceProfile` as a JSON file.

Invariant: what was saved is loaded equal, and a file that is not exactly a profile is refused with the field's name.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from libra.config.run import ConfigError
from libra.cost.device import DeviceProfile


@cache
def _profiles() -> TypeAdapter[DeviceProfile]:
    return TypeAdapter(DeviceProfile)


def save_profile(path: Path, profile: DeviceProfile) -> None:
    """Write the file whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_bytes(_profiles().dump_json(profile, indent=1) + b"\n")
    part.rename(path)


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile. Raises `ConfigError` naming the file and the field."""
    try:
        return _profiles().validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a profile.json that a run has written") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(f"{path}: {field}: {first['msg']}; give a profile.json that a run has written") from None
