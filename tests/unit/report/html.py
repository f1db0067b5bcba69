"""Tables of a page, without its markup."""

import re
from html import unescape


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The rows of cells of each table by its caption, the header first."""
    found = {}
    for table in re.findall(r"<table>(.*?)</table>", page, re.DOTALL):
        caption = re.search(r"<caption>(.*?)(?:<p|</caption>)", table, re.DOTALL)[1]
        rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr>(.*)</tr>", table))
        texts = [[" ".join(unescape(re.sub(r"<[^>]*>", "", cell)).split()) for cell in row] for row in rows]
        found[unescape(caption)] = texts
    return found
