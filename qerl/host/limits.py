"""Limits of time and memory for what foreign files let a library compute: chat templates and regular expressions.

No thread can interrupt a regular expression or a power of integers, so a process of its own tries them first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache

#: Seconds of CPU time, which a busy machine doesn't use up, and bytes of memory.
SECONDS = 5
_BYTES = 2**31
#: Seconds after which the process is ended whatever it does.
_WAIT = 120
_LIMITED = """
import json, resource, sys
given = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"],) * 2)
resource.setrlimit(resource.RLIMIT_AS, (given["bytes"],) * 2)
"""
#: As transformers renders: its tag "generation" alone is left out, which changes no text.
_TEMPLATE = """
import re
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = lambda value, **options: json.dumps(value)
environment.globals["strftime_now"] = str
def refuse(message):
    raise ValueError(message)
environment.globals["raise_exception"] = refuse
template = re.sub(r"{%-?\\s*(end)?generation\\s*-?%}", "", given["template"])
for messages in given["chats"]:
    try:
        environment.from_string(template).render(messages=messages, add_generation_prompt=True, **given["tokens"])
    except MemoryError:
        raise
    except Exception:
        pass  # what a template raises is said where its text is used
"""
_PATTERNS = """
import re
for pattern in map(re.compile, given["patterns"]):
    for name in given["names"]:
        pattern.fullmatch(name), pattern.match(name)
"""
_TEXT = "Two trains leave at 9 and at 10. Which arrives first, and when? " * 5
_CHATS = [
    [{"role": "user", "content": _TEXT}],
    [{"role": "system", "content": _TEXT}, {"role": "user", "content": _TEXT}],
    [{"role": role, "content": _TEXT} for role in ("user", "assistant", "user")],
]


@cache
def template_ends(template: str, tokens: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether a chat template renders short chats, or raises an error, within the limits; `tokens` are its names."""
    return _ends(_TEMPLATE, {"template": template, "chats": _CHATS, "tokens": dict(tokens)})


def patterns_end(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether regular expressions are valid and match names, or don't, within the limits."""
    return _ends(_PATTERNS, {"patterns": [*patterns], "names": [*names]})


def _ends(script: str, given: Mapping[str, object]) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LIMITED + script],
            input=json.dumps({**given, "seconds": SECONDS, "bytes": _BYTES}),
            text=True,
            capture_output=True,
            timeout=_WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
