"""The page of samples: one file of HTML with all data, which needs no network.

The data of a view is a compressed part of the page, which the browser unpacks when somebody opens the view. Compressed
parts are in Base64, so that no completion can end the element that holds it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.jobs.report import SamplesJob
from qerl.provenance.files import write_text
from qerl.report.html import rendered
from qerl.report.samples import Json, Source, View, sources_of
from qerl.results.files import ResultError
from qerl.results.paths import REPORT_PAGE, RESULT, RUN

#: The largest size of a configuration's page, in 10^6 bytes.
MEGABYTES = 5.0
#: By how many halvings of its problems a view may be shortened.
_HALVINGS = 12
#: More bytes than a source or a view has in the index, with the elements of its parts.
_ENTRY = 300
_TEMPLATE, _STYLE, _SCRIPTS = "samples.j2", "samples.css", ("samples_data.js", "samples.js")
_HERE = Path(__file__).parent


class PageSizeError(ResultError):
    """Samples that don't fit into a page. The message is one sentence for the user."""


def write_page(job: SamplesJob) -> None:
    """Make the page of a configuration's samples."""
    paths = [Path(line) for line in job.results.read_text(encoding="utf-8").splitlines()]
    sources = sources_of(*([path for path in paths if path.name == name] for name in (RUN, RESULT)))
    make_page(job.name, sources, job.out, report=REPORT_PAGE)


def make_page(
    title: str, sources: Sequence[Source], out: Path, megabytes: float = MEGABYTES, *, report: str = ""
) -> None:
    """Write the page, with as many problems of each view as fit into `megabytes`, and a link to the report, if any."""
    frame = len(_html(title, report, "", []))
    packed = _Packed([_shortened(view) for source in sources for view in source.views])
    halvings = packed.fitting(1e6 * megabytes - frame - _ENTRY * sum(1 + len(source.views) for source in sources))
    index = {"title": title, "sources": packed.index(sources, halvings)}
    write_text(out, _html(title, report, _pack(index), packed.parts(halvings)))


def _html(title: str, report: str, index: str, parts: Sequence[str]) -> str:
    own_style, *scripts = ((_HERE / file).read_text(encoding="utf-8") for file in (_STYLE, *_SCRIPTS))
    files = {"own_style": own_style, "script": "\n".join(scripts)}
    return rendered(_TEMPLATE, title=title, report=report, index=index, parts=parts, **files)


def _pack(value: Any) -> str:
    """JSON, compressed, in Base64; the script unpacks it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@dataclass(frozen=True)
class _PackedView:
    """The packed first problems of a view: their prompts, which views share, all else, and counts."""

    prompts: str
    samples: str
    about: Json


@dataclass(frozen=True)
class _Shortened:
    """A view at each number of halvings, until one problem is left."""

    view: View
    parts: list[_PackedView]

    def at(self, halvings: int) -> _PackedView:
        return self.parts[min(halvings, len(self.parts) - 1)]


def _shortened(view: View) -> _Shortened:
    problems = list(view.problems())
    counts = list(dict.fromkeys(max(len(problems) >> halving, 1) for halving in range(_HALVINGS + 1)))
    return _Shortened(view, [_packed_view(problems[:count], len(problems)) for count in counts])


def _packed_view(problems: list[Json], stored: int) -> _PackedView:
    completions = [completion for problem in problems for completion in problem["completions"]]
    about = {
        "problems": len(problems),
        "stored": stored,
        "completions": len(completions),
        "right": sum(completion["verdicts"][0][1] for completion in completions),
    }
    rest = [{key: value for key, value in problem.items() if key != "prompt"} for problem in problems]
    return _PackedView(_pack([problem["prompt"] for problem in problems]), _pack(rest), about)


@dataclass(frozen=True)
class _Packed:
    """All views of a page, in the order of its sources."""

    views: list[_Shortened]

    def fitting(self, size: float) -> int:
        """The least number of halvings at which the parts fit into `size` bytes."""
        for halvings in range(_HALVINGS + 1):
            if sum(map(len, self.parts(halvings))) <= size:
                return halvings
        raise PageSizeError(
            f"{len(self.views)} steps and evaluations don't fit into a page of this size; name fewer runs, or raise "
            "--megabytes"
        )

    def parts(self, halvings: int) -> list[str]:
        """All parts of the page; equal ones, such as the prompts of one data set, are there once."""
        chosen = [view.at(halvings) for view in self.views]
        return list(dict.fromkeys(text for part in chosen for text in (part.prompts, part.samples)))

    def index(self, sources: Sequence[Source], halvings: int) -> list[Json]:
        """What the page knows before any part is unpacked."""
        places = {text: place for place, text in enumerate(self.parts(halvings))}
        left = iter(self.views)
        return [
            {
                "id": source.id,
                "about": source.about,
                "before": source.before,
                "views": [_entry(next(left), halvings, places) for _ in source.views],
            }
            for source in sources
        ]


def _entry(shortened: _Shortened, halvings: int, places: dict[str, int]) -> Json:
    part, view = shortened.at(halvings), shortened.view
    where = {"prompts": places[part.prompts], "samples": places[part.samples]}
    return {"step": view.step, "trained": view.trained, **where, **part.about}
