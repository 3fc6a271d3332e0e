"""Hooks of `make docs`: pages and files outside `docs` that the documentation links to become part of the site.

Invariant: a link means the same in a checkout and on the site. README.md and its siblings become pages; other files
that a page links to, such as examples and kept results, are copied; a link to a directory leads to its list of files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PAGES:
        text = _moved((ROOT / name).read_text(encoding="utf-8"), ROOT)
        files.append(File.generated(config, name, content=text))
    for target in sorted(_linked()):
        if target.is_dir():
            listed = "\n".join(f"- [{it.name}]({it.name})" for it in sorted(target.iterdir()) if it.is_file())
            files.append(
                File.generated(config, f"{_site_name(target)}/index.md", content=f"# {target.name}\n\n{listed}\n")
            )
            for each in (it for it in target.iterdir() if it.is_file()):
                _copy(files, config, each)
        else:
            _copy(files, config, target)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    name: str = page.file.src_uri
    return markdown if name in PAGES or "/" in name else _moved(markdown, ROOT / "docs")


def _copy(files: Files, config: MkDocsConfig, path: Path) -> None:
    name = _site_name(path)
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(path)))


def _site_name(path: Path) -> str:
    """Its place on the site: a file with Python or Markdown in it is shown as text, not rendered."""
    name = path.relative_to(ROOT).as_posix().lstrip(".")
    return f"{name}.txt" if path.suffix in (".py", ".md") or path.name.startswith(".") else name


def _linked() -> set[Path]:
    """Files and directories outside `docs` that a page links to, but for pages."""
    found = set()
    for page in (*(ROOT / name for name in PAGES), *(ROOT / "docs").glob("*.md")):
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = _target(match[2], page.parent)
            if target is not None and target.name not in PAGES and ROOT / "docs" not in target.parents:
                found.add(target)
    return found


def _target(link: str, folder: Path) -> Path | None:
    """The file that a relative link names; None for addresses and for what is not there."""
    if re.match(r"[a-z]+:", link):
        return None
    target = (folder / link).resolve()
    return target if target.exists() and ROOT in target.parents else None


def _moved(text: str, folder: Path) -> str:
    """The text with relative links as they are on the site, whose root is `docs` with the pages of ROOT beside."""

    def moved(match: re.Match[str]) -> str:
        target = _target(match[2], folder)
        if target is None:
            return match[0]
        if ROOT / "docs" in target.parents:
            place = target.relative_to(ROOT / "docs").as_posix()
        elif target.name in PAGES:
            place = target.name
        else:
            place = f"{_site_name(target)}/index.md" if target.is_dir() else _site_name(target)
        return f"{match[1]}{place}{match[3] or ''}{match[4]}"

    return _LINK.sub(moved, text)
