"""Long runs of the search are short ones in tests."""

from __future__ import annotations

import pytest

from libra.serving import answer, ladder


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small engines serve hundreds of requests/s, which make long runs of thousands of requests."""
    monkeypatch.setattr(ladder, "LASTING", 4)
    for module in (answer, ladder):
        monkeypatch.setattr(module, "BRIEF", 1)
    monkeypatch.setattr(ladder, "_ENOUGH", 200)
