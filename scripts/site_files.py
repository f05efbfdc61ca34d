"""A hook of MkDocs: the site has the repository's documents at their own paths.

So a link between README.md, docs/, examples/ and configs/ leads to the same file on the site as in
the repository, and `mkdocs build --strict` checks each.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = (
    "*.md",
    "LICENSE",
    "benchmarks/*.md",
    "benchmarks/*.py",
    "benchmarks/prompts.jsonl",
    "configs/*.yaml",
    "constraints.txt",
    "docker/*",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/**/*.svg",
    "docs/site.css",
    "examples/**/*",
    "models/README.md",
    "pipeline/**/*.py",
    "tests/**/*.py",
    ".github/workflows/*.yml",
)
"""Pages, and what they link to."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the theme's own files and what is shown; pages come from nowhere else."""
    shown = Files([file for file in files if file.src_dir != config.docs_dir])
    for path in sorted({path for pattern in SHOWN for path in ROOT.glob(pattern)}):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            shown.append(File.generated(config, name, abs_src_path=str(path)))
    return shown
