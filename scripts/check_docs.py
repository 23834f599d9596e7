"""Checks the Markdown pages: relative links lead somewhere, and the examples print what they say.

In a page, a ``python`` block that a ``text`` block follows directly is run in a fresh interpreter
and must print exactly that text; lines with ``>>>`` in a ``pycon`` block are doctests, and so are
those in docstrings of the package. Exit status 1 when anything is wrong, one line each.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
# A body has no fence in it: the block before the text is meant, not the first one on the page.
RUN = re.compile(
    r"^```python\n((?:(?!```).*\n)*)```\n\n?```text\n((?:(?!```).*\n)*)```$", re.MULTILINE
)
PYCON = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every Markdown page of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made the way that code hosts make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in kept}


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page that lead to no file or to no heading."""
    for pair in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = pair[0] or pair[1]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: no file {target}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{page.relative_to(ROOT)}: no heading {target}"


def failing_examples(page: Path) -> Iterator[str]:
    """Examples of a page that do not print what the page says they print."""
    text = page.read_text(encoding="utf-8")
    for code, expected in RUN.findall(text):
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        if done.stdout.strip() != expected.strip() or done.returncode:
            first = code.strip().splitlines()[0]
            yield (
                f"{page.relative_to(ROOT)}: the example {first!r} printed\n"
                f"{done.stdout}{done.stderr}instead of\n{expected}"
            )
    parser = doctest.DocTestParser()
    for number, code in enumerate(PYCON.findall(text), start=1):
        name = f"{page.relative_to(ROOT)}[{number}]"
        yield from _failures(parser.get_doctest(code, {}, name, str(page), 0))


def failing_docstrings() -> Iterator[str]:
    """Doctests in the package's docstrings that fail. Modules without ``>>>`` are not imported."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in sorted((ROOT / "src").rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            module = importlib.import_module(".".join(p for p in parts if p != "__init__"))
            for test in finder.find(module):
                yield from _failures(test)


def _failures(test: doctest.DocTest) -> Iterator[str]:
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    with contextlib.redirect_stdout(report):
        failed = runner.run(test, out=report.write).failed
    if failed:
        yield f"{test.name}: {report.getvalue().strip()}"


def main() -> int:
    """Check everything and print what is wrong; the exit status."""
    checked = pages()
    problems = [p for page in checked for p in (*broken_links(page), *failing_examples(page))]
    problems += failing_docstrings()
    for problem in problems:
        print(problem)
    print(f"{len(checked)} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
