"""What the page of samples contains, read without its script."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any


def parts_of(page: Path) -> dict[str, Any]:
    """The data of a page of samples, by the names of its parts; `index` lists its sources and their views."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', page.read_text())
    return {name: json.loads(zlib.decompress(base64.b64decode(text))) for name, text in found}
