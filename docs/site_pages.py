"""Generate pages of the site from other files: the README as the first page, the reference, and code that pages link to.

On a git host these links lead into the repository; on the site a page shows the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from lightning_rl import EXPORTS, MODELS

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".cfg": "ini", ".md": "markdown", ".txt": "text", ".toml": "toml"}
GROUPS = {
    "Algorithms": ("algorithms", "training.behaviors"),
    "Runs and evaluation": ("training", "callbacks", "policy", "exporting", "reports", "errors"),
    "Settings": ("envs", "actors", "networks", "data", "demonstrations", "settings"),
}
"""The parts of the reference, and the packages whose classes and functions they show."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the files that pages link to."""
    made = {"index.md": "---\nhide: [navigation, toc]\n---\n" + (ROOT / "README.md").read_text("utf-8"), "reference.md": reference()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    linked = {
        target
        for file in list(files.documentation_pages())
        for target, _ in map(re.Match.groups, LINK.finditer(file.content_string))
        for target in [resolve(file.src_uri, target)]
        if target is not None
    }
    for target in sorted(linked):
        if (ROOT / target).suffix in LANGUAGES:
            files.append(File.generated(config, page_of(target), content=show(ROOT / target)))
        elif (ROOT / target).is_file():
            files.append(File.generated(config, f"source/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Redirect links into the repository to the pages that show those files."""
    here = page.file.src_uri

    def lead(found: re.Match[str]) -> str:
        target = resolve(here, found[1])
        if here == "index.md" and found[1].startswith("docs/"):
            return f"]({found[1].removeprefix('docs/')}{found[2] or ''})"
        if target is None:
            return found[0]
        if (ROOT / target).is_dir():
            return "]"  # a folder has no page
        place = page_of(target) if (ROOT / target).suffix in LANGUAGES else f"source/{target}"
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{found[2] or ''})"

    return LINK.sub(lead, markdown)


def resolve(page: str, link: str) -> str | None:
    """Return the repository path of a link to a file outside `docs/`; None for links to other pages."""
    base = "" if page == "index.md" else posixpath.dirname(f"docs/{page}")
    target = posixpath.normpath(posixpath.join(base, link))
    return None if target.startswith("docs/") or not (ROOT / target).exists() else target


def page_of(target: str) -> str:
    """Return the page that shows a file."""
    return f"source/{target}.md"


def show(file: Path) -> str:
    """Return a page with a file's text."""
    return f"# {file.relative_to(ROOT)}\n\n````{LANGUAGES[file.suffix]}\n{file.read_text('utf-8')}\n````\n"


def reference() -> str:
    """Return the page with everything that `import lightning_rl as lrl` provides."""
    parts = [
        "# Reference",
        "Everything that `import lightning_rl as lrl` provides. The settings of algorithms are described on the pages of algorithms.",
    ]
    for title in GROUPS:
        parts.append(f"## {title}")
        for name, module in EXPORTS.items():
            if next(group for group, owned in GROUPS.items() if belongs(module, owned)) == title:
                members = "" if name not in MODELS else "\n    options:\n      separate_signature: false\n      show_signature: false"
                parts.append(f"::: {module}.{name}{members}")
    return "\n\n".join(parts) + "\n"


def belongs(module: str, packages: tuple[str, ...]) -> bool:
    """Return whether a module is in one of the given packages."""
    return any(f"{module}.".startswith(f"lightning_rl.{package}.") for package in packages)
