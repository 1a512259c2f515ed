"""Prepare the repository's pages for MkDocs. The same files are also read in the repository itself, so their
links are changed here. README.md becomes the front page, docs/tutorial.py a page and a notebook; files
outside docs/ to which a page links are put into project/.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)]*)?\)")
CELL_START = re.compile(r"^# %%.*\n", re.MULTILINE)
NOT_IN_SITE = re.compile(r"<!-- not in the site -->.*?\n\n", re.DOTALL)
WIDE_PAGES = (
    "deviations.md",
    *(f"project/benchmarks/{name}.md" for name in ("EVIDENCE", "RESULTS")),
)
NOT_SEARCHED = ("LOG.md", "RESULTS.md", "CHANGELOG.md")


def site_path(path: str) -> str:
    """Returns the path in the site of a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path == "docs/tutorial.py":
        return "tutorial.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"


def linked_files(page: str) -> dict[str, str]:
    """Returns {link: path of its target} for each link of a page to a file or folder of the repository."""
    found = {}
    for _, link, _ in LINK.findall((ROOT / page).read_text()):
        path = os.path.normpath(os.path.join(os.path.dirname(page), link))
        if (ROOT / path).exists():
            found[link] = path
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README.md, the files that pages link to, and the tutorial to the files of the site."""
    known = {file.src_uri for file in files.documentation_pages()}
    left = ["README.md", *(f"docs/{name}" for name in known)]
    done = {f"docs/{file.src_uri}" for file in files if not file.inclusion.is_excluded()}
    while left:
        page = left.pop()
        if page.endswith(".md"):
            paths = set(linked_files(page).values()) - done - set(left)
            left += [path for path in paths if (ROOT / path).is_file()]
        if page not in done and page != "docs/tutorial.py":
            files.append(File.generated(config, site_path(page), abs_src_path=str(ROOT / page)))
        done.add(page)
    page_text, notebook = page_and_notebook((ROOT / "docs/tutorial.py").read_text())
    files.append(File.generated(config, "tutorial.md", content=page_text))
    files.append(File.generated(config, "tutorial.ipynb", content=notebook))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns a page with its links changed to the paths of the site."""
    here = page.file.src_uri
    if here == "tutorial.md":
        return markdown
    source = "README.md" if here == "index.md" else f"docs/{here}"
    if here.startswith("project/"):
        source = here.removeprefix("project/")
    paths = linked_files(source)
    page.meta["search"] = {"exclude": here.endswith(NOT_SEARCHED)}
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # the navigation would list only this page
    elif here in WIDE_PAGES:
        page.meta["hide"] = ["toc"]

    def site_link(found: re.Match[str]) -> str:
        words, link, anchor = found.groups(default="")
        if link not in paths:
            return found[0]
        if (ROOT / paths[link]).is_dir():  # the site has no pages for folders
            return words
        target = os.path.relpath(site_path(paths[link]), os.path.dirname(here) or ".")
        return f"[{words}]({target}{anchor})"

    return LINK.sub(site_link, NOT_IN_SITE.sub("", markdown))


def page_and_notebook(script: str) -> tuple[str, str]:
    """Returns a script with # %% cells as (a Markdown page, a Jupyter notebook)."""
    page, cells = [], []
    for number, cell in enumerate(CELL_START.split(script)[1:]):
        text = cell.strip()
        is_text = text.startswith('"""')
        text = text.strip('"').strip() if is_text else text
        page.append(text if is_text else f"```python\n{text}\n```")
        if number == 0:
            page.append("As a [notebook](tutorial.ipynb).")
        shown: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": text}
        if is_text:
            cells.append({"cell_type": "markdown", **shown})
        else:
            cells.append({"cell_type": "code", "execution_count": None, "outputs": [], **shown})
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return "\n\n".join(page) + "\n", json.dumps(notebook, indent=1)
