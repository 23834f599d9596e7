"""Writes the tables in docs/ that are made from data; with --check, only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pdcore.request import TRANSITIONS

PAGE = Path(__file__).parents[1] / "docs" / "life-of-a-request.md"
TABLE = re.compile(r"(<!-- transitions: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def transitions_table() -> str:
    """The legal transitions as a Markdown table."""
    lines = ["| from | to |", "|---|---|"]
    for status, targets in TRANSITIONS.items():
        names = ", ".join(sorted(target.value for target in targets)) or "nothing"
        lines.append(f"| {status.value} | {names} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Render, or compare; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    rendered = TABLE.sub(lambda match: match[1] + transitions_table() + match[2], text)
    if "--check" in sys.argv[1:]:
        if rendered != text:
            print(f"{PAGE.name} is out of date: run scripts/render_docs.py")
            return 1
        return 0
    PAGE.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
