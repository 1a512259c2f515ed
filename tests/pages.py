"""The pages that people write, and the blocks of code in them."""

import re
import shlex
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
OTHERS = ("CHANGELOG.md", "docs/commands.md", "docs/settings.md")
PATTERNS = ("*.md", "docs/*.md", "*/README.md", "benchmarks/EVIDENCE.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
    if str(path.relative_to(ROOT)) not in OTHERS
}
CODE = re.compile(
    r"^ *```(?P<language>\w*)\n(?P<fenced>(?s:.*?))^ *```$"
    r"|^(?:#.*)?\n(?P<indented>(?: {4}.*\n|\n+(?= {4}))+)",
    re.MULTILINE,
)


def blocks(page):
    """(line, language, text) of each, fenced or indented by four spaces."""
    for found in CODE.finditer(PAGES[page]):
        text = dedent(found["fenced"] or found["indented"])
        line = (
            PAGES[page].count("\n", 0, max(found.span("fenced")[0], found.span("indented")[0])) + 1
        )
        yield line, _language(found["language"] or "", text), text


def _language(named, text):
    if named:
        return {"py": "python"}.get(named, named)
    if text.startswith(("import ", "from ")):
        return "python"
    return "csv" if text.startswith("record,") else "sh"


def commands(text):
    """(line, words) of each command in a block of shell lines, without what it sets in its environment."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in line.split(" && "):
            words = shlex.split(command, comments=True)
            while words and re.match("[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield command, words
