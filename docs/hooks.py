"""What `mkdocs build` does before it reads the pages: packages where imports find them, pages that live elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/locret/locret/blob/main/"
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_startup(**settings: Any) -> None:
    """Lay the packages out like the wheel: in the checkout train, infer and data lie next to locret."""
    packages = ROOT / "build" / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    for source, target in {"locret": "", "train": "train", "infer": "infer", "data": "data"}.items():
        ignored = shutil.ignore_patterns("__pycache__", "records")
        shutil.copytree(ROOT / source, packages / "locret" / target, ignore=ignored, dirs_exist_ok=True)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that a reader of the repository expects at its top, and the glossary as a page of its own."""
    texts = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in PAGES.items()}
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    texts["glossary.md"] = "# Glossary" + architecture.split("\n## Glossary", 1)[1].split("\n## ", 1)[0]
    for page, text in texts.items():
        # Within the site these links stay in the site.
        text = text.replace(REPOSITORY + "docs/", "").replace("](docs/", "](")
        for name, source in PAGES.items():
            text = text.replace(REPOSITORY + source, name)
        files.append(File.generated(config, page, content=text))
    return files
