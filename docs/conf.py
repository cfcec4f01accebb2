"""Sphinx builds the manual: `uv run --group docs sphinx-build -W docs docs/_build/html`."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
sys.path.insert(0, str(ROOT))

project = "jaxtrain"
author = "The jaxtrain authors"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "config_reference",
    "command_reference",
]
autodoc_typehints = "none"  # the signatures of jaxtyping are long; the texts name the shapes
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jaxtrain"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_theme_options = {
    "source_repository": "https://github.com/jaxtrain/jaxtrain/",
    "source_branch": "main",
    "source_directory": "docs/",
}
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests execute the notebooks, at a tiny size
suppress_warnings = ["myst.xref_missing", "mystnb.unknown_mime_type"]
copybutton_prompt_text = "$ "


def copy_notebooks() -> None:
    """Sphinx reads only what is below docs/."""
    target = ROOT / "docs" / "tutorials" / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy(path, target)


copy_notebooks()
