"""Counters of tokens, for texts whose tokens a log does not count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class TokenCount(Protocol):
    """Counts the tokens of a text."""

    @property
    def how(self) -> str:
        """Completes the sentence "tokens are ...", such as "counted by FILE"."""
        ...

    def __call__(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True)
class CharacterCount:
    """Estimates tokens as characters divided by `characters_per_token`, rounded up."""

    characters_per_token: float = 4.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.characters_per_token) and self.characters_per_token > 0):
            raise ValueError(f"characters_per_token is {self.characters_per_token}; set it to more than 0, and finite")

    @property
    def how(self) -> str:
        return f"estimated ({self.characters_per_token:g} characters a token)"

    def __call__(self, text: str) -> int:
        return math.ceil(len(text) / self.characters_per_token)


class TokenizerCount:
    """Counts with a model's tokenizer, from `tokenizer.json` in its folder. Special tokens are not added."""

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` if the file, or the library `tokenizers`, is missing."""
        file = folder / "tokenizer.json"
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("tokenizers is not installed: pip install tokenizers") from None
        try:
            self._tokenizer: Any = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}; give the folder of a model with a tokenizer.json") from None
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ValueError(f"{file}: not a tokenizer ({' '.join(str(error).split())[:80]}); fetch it again") from None
        self.how = f"counted by {file}"

    def __call__(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
