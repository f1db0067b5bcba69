"""`python -m tests.families` draws the tables of families in docs/models.md and README.md."""

import re
from pathlib import Path

from qerl.plan.families import long_table, refusals, short_table

ROOT = Path(__file__).parents[1]


def pages() -> dict[Path, str]:
    """The pages with their tables as the code has them."""
    models, readme = ROOT / "docs/models.md", ROOT / "README.md"
    text = models.read_text()
    for name, table in (("families", long_table()), ("refusals", refusals())):
        text = re.sub(
            rf"<!-- {name} -->\n.*?<!-- end -->", f"<!-- {name} -->\n{table}\n<!-- end -->", text, flags=re.DOTALL
        )
    table = re.sub(r"\| model \| .*?\n\n", f"{short_table()}\n\n", readme.read_text(), count=1, flags=re.DOTALL)
    return {models: text, readme: table}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
