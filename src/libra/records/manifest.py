"""The manifest of a directory, with the length and SHA-256 of each of its files. The manifest is written last.

Invariant: if a directory passes `check_manifest`, its files are unchanged since they were sealed. The manifest is one
JSON line with its own checksum, so that a damaged manifest is detected.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec

from libra.config.sealed_line import sealed, unsealed
from libra.records.files import write_whole, writing

MANIFEST = "manifest.json"
_MOST_BYTES = 1 << 20  # of a manifest


class ManifestError(ValueError):
    """A directory has changed since it was sealed. The message has the file and the fault."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, _Entry]


_decoder = msgspec.json.Decoder(_Manifest)


def seal(directory: Path) -> None:
    """Force the files of a directory to disk, read them back, and write its manifest. The files and the manifest are on
    disk when the function returns. Raises `DiskError`."""
    with writing(directory):
        files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST)
        entries = {path.name: _entry(path, force=True) for path in files}
    write_whole(directory / MANIFEST, sealed(msgspec.json.encode(_Manifest(entries))))
    force_directory(directory)


def check_manifest(directory: Path, required: str, *, contents: bool = True) -> None:
    """Compare the files with the manifest, which must list `required`. Without `contents`, compare only lengths, and
    the contents of `required`. Raises `ManifestError`."""
    for name, entry in _read(directory, required).items():
        path = directory / name
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise ManifestError(f"{path} is not a regular file")
            if found.st_size != entry.bytes:
                raise ManifestError(f"{path} has {found.st_size} bytes, not {entry.bytes}")
            if (contents or name == required) and _entry(path) != entry:
                raise ManifestError(f"{path} is damaged: its SHA-256 has changed")
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}") from None


def force_directory(directory: Path) -> None:
    """Force a directory's list of files to disk. Raises `DiskError`."""
    with writing(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(directory: Path, required: str) -> dict[str, _Entry]:
    path = directory / MANIFEST
    try:
        size = path.stat().st_size if path.is_file() else -1
        if not 0 <= size <= _MOST_BYTES:
            raise ManifestError(f"{path} is missing: the directory is unfinished, or from another version of libra")
        files = _decoder.decode(unsealed(path.read_bytes())).files
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{path} is damaged: {error}") from None
    if required not in files or any(os.path.basename(name) != name for name in files):  # noqa: PTH119
        raise ManifestError(f"{path} is damaged: it does not list {required}")
    return files


def _entry(path: Path, *, force: bool = False) -> _Entry:
    """Length and digest of a file. With `force`, its content is first written to disk."""
    with open(path, "rb") as file:
        if force:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _Entry(os.fstat(file.fileno()).st_size, digest)
