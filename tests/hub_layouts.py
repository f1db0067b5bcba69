"""Miniatures of the paper's data sets in the layout of their repositories: card, files, columns, types."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Rows = list[dict[str, Any]]


def parquet(files: Mapping[str, Rows], subsets: Mapping[str, Mapping[str, str]]) -> Callable[[Path], None]:
    """A repository of parquet files, by path without the number of the shard, and a card with the files of subsets."""

    def write(folder: Path) -> None:
        for path, rows in files.items():
            file = folder / f"{path}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows).to_parquet(file)
        lines = ["---", "license: mit", "configs:"]
        for name, splits in subsets.items():
            lines += [f"- config_name: {name}", "  data_files:"]
            for split, path in splits.items():
                lines += [f"  - split: {split}", f"    path: {path}-*"]
        (folder / "README.md").write_text("\n".join([*lines, "---", "", "# A data set", ""]))

    return write


def one_file(path: str, split: str, rows: Rows) -> Callable[[Path], None]:
    """A repository with a file of one split."""
    return parquet({path: rows}, {"default": {split: path}})


def gsm8k(numbers: range, hint: str) -> Rows:
    solutions = ((n, f"{hint}{n}+2=<<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}") for n in numbers)
    return [{"question": f"Ann has {n} apples and buys 2. How many?", "answer": text} for n, text in solutions]


#: Solve rates of each level of the miniature Big-Math.
SOLVE_RATES = {3: 0.5, 4: 0.25, 5: 0.03125}


def big_math(levels: tuple[int, ...]) -> Rows:
    """Problems whose solution is the bare answer."""
    return [
        {
            "prompt": f"Level {level}: what is $\\frac{{{n}}}{{7}}$ of one?" + " Think." * (200 * (n == 3)),
            "solution": f"\\frac{{{n}}}{{7}}",
            "source": "cn_k12",
            "domain": ["Mathematics -> Algebra -> Other"],
            "llama8b_solve_rate": SOLVE_RATES[level],
        }
        for level in levels
        for n in (1, 2, 3)
    ]


def math_500(folder: Path) -> None:
    """One file of lines, and a card without configs."""
    rows = [
        {
            "problem": f"What is half of {n}?",
            "solution": f"We halve: $\\frac{{1}}{{2}} \\cdot {n} = \\boxed{{\\frac{{{n}}}{{2}}}}$.",
            "answer": f"\\frac{{{n}}}{{2}}",
            "subject": "Prealgebra",
            "level": n % 5 + 1,
            "unique_id": f"test/prealgebra/{n}.json",
        }
        for n in (1, 3, 5)
    ]
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text("---\ntask_categories:\n- text-generation\nlanguage:\n- en\n---\n")


_SUBSETS = {"level_3_4_5": (3, 4, 5), "level_4_5": (4, 5), "level_5": (5,)}
_AIME_2025 = [
    {"problem": f"Find {n}+{n}.", "answer": str(2 * n), "solution": "", "id": str(n), "year": 2025, "url": ""}
    for n in (7, 35, 294)
]
REPOSITORIES: dict[str, Callable[[Path], None]] = {
    # Subsets main and socratic, whose files have the same names.
    "openai/gsm8k": parquet(
        {
            f"{subset}/{split}": gsm8k(numbers, hint)
            for subset, hint in (("main", ""), ("socratic", "How? ** "))
            for split, numbers in (("train", range(12)), ("test", range(100, 103)))
        },
        {subset: {split: f"{subset}/{split}" for split in ("train", "test")} for subset in ("main", "socratic")},
    ),
    "open-r1/Big-Math-RL-Verified-Processed": parquet(
        {f"{subset}/train": big_math(levels) for subset, levels in _SUBSETS.items()},
        {subset: {"train": f"{subset}/train"} for subset in _SUBSETS},
    ),
    # No levels but the solve rate, which some problems lack.
    "SynthLabsAI/Big-Math-RL-Verified": one_file(
        "data/train",
        "train",
        [
            {"problem": f"What is {n}+1?", "answer": str(n + 1), "source": "orca_math", "domain": []}
            | {"llama8b_solve_rate": rate}
            for n, rate in enumerate((0.0, 0.25, 0.5, 0.75, None))
        ],
    ),
    "HuggingFaceH4/MATH-500": math_500,
    # Its only split is called train; answers have leading zeros.
    "HuggingFaceH4/aime_2024": one_file(
        "data/train",
        "train",
        [
            {"id": 60 + n, "problem": f"Find {n} times 11.", "solution": f"It is \\boxed{{{n * 11:03d}}}."}
            | {"answer": f"{n * 11:03d}", "url": "https://artofproblemsolving.com", "year": "2024"}
            for n in (3, 18)
        ],
    ),
    # `default` is both halves, each of which is a subset of its own in a folder of its own.
    "yentinglin/aime_2025": parquet(
        {"data/train": _AIME_2025, "part1/train": _AIME_2025[:2], "part2/train": _AIME_2025[2:]},
        {name: {"train": f"{path}/train"} for name, path in (("default", "data"), ("part1",) * 2, ("part2",) * 2)},
    ),
    # The answer is text, a float, possibly none of AIME's.
    "math-ai/amc23": one_file(
        "test",
        "test",
        [
            {"id": n, "question": f"What is {answer}?", "answer": answer, "url": ""}
            for n, answer in enumerate(("27.0", "3159.0", "-1.0", "0.0"))
        ],
    ),
}

#: How each is configured: format, origin (without repo and revision) and columns.
SETTINGS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"format": "gsm8k", "origin": {"subset": "main"}},
    "open-r1/Big-Math-RL-Verified-Processed": {
        "format": "math",
        "origin": {"subset": "level_3_4_5", "splits": {"train": "train"}},
        "columns": {"problem": "prompt", "answer": "solution"},
    },
    "SynthLabsAI/Big-Math-RL-Verified": {"format": "math", "origin": {"splits": {"train": "train"}}},
    "HuggingFaceH4/MATH-500": {"format": "math", "origin": {"splits": {"test": "test"}}},
    "HuggingFaceH4/aime_2024": {"format": "aime", "origin": {"splits": {"test": "train"}}},
    "yentinglin/aime_2025": {"format": "aime", "origin": {"splits": {"test": "train"}}},
    "math-ai/amc23": {"format": "math", "origin": {"splits": {"test": "test"}}, "columns": {"problem": "question"}},
}


def settings(repo: str, folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Values of `DatasetSettings` for a repository, from the hub's cache or a local copy."""
    values = {**SETTINGS[repo], **changes}
    origin = {"source": "hub", "repo": repo, "revision": COMMIT, **values["origin"]}
    return {**values, "origin": {**origin, **({"folder": folder} if folder else {})}}


def cached(repo: str, home: Path) -> None:
    """A data set as `hf download` leaves it in the hub's cache under the folder `home`, for HF_HOME."""
    plain = home / "plain"
    REPOSITORIES[repo](plain)
    into_cache(plain, f"datasets--{repo.replace('/', '--')}", home)


def into_cache(plain: Path, name: str, home: Path) -> None:
    """Move the files of a repository into the hub's cache: blobs, a snapshot of links to them, the main branch."""
    root = home / "hub" / name
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(path for path in sorted(plain.rglob("*")) if path.is_file()):
        link = root / "snapshots" / COMMIT / file.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.rename(root / "blobs" / str(number)))
