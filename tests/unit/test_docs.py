"""The figures of docs/speed.md equal the committed tables, and README has rows of it. `make lint` checks the links."""

import json
import re
from pathlib import Path
from statistics import median

import pandas as pd
import pytest

from qerl.report import speed_tables
from qerl.report.speed_tables import mix_table
from qerl.results.paths import METRICS, committed_files
from qerl.results.speeds import load
from qerl.settings.base import read_yaml
from tests.scaling import PAGE, RESULTS, page

ROOT = Path(__file__).parents[2]
PEERS, CARDS, OF_H100 = (ROOT / "results/reference" / name for name in ("h200/peers", "h200/cards", "h100/peers"))
FAMILIES = [ROOT / folder for folder in read_yaml(ROOT / "config/families.yaml")["shapes"]["samples"]]


SPEED = (ROOT / "docs/speed.md").read_text().splitlines()


def readme_row(work: str) -> list[list[str]]:
    """The figures in the row of the page of speed for some work: ours, the peer's, the ratio."""
    [line] = [line for line in SPEED if line.startswith(f"| {work}")]
    return [re.findall(r"[\d,]*\.?\d+", cell.rpartition(":")[2]) for cell in line.strip("|").split("|")[1:4]]


def test_the_speeds_of_the_readme_are_rows_of_the_page():
    section = (ROOT / "README.md").read_text().split("## How fast\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows
    assert not {*rows} - {*SPEED}
    assert [row.split("|")[1].strip() for row in rows[2:]] == [*OF_README]


#: The rows of the README, and the samples that each is of: ours and the peer's.
OF_README = {
    "7B rollout of mixed lengths, 64 prompts × 8, end to end, LoRA r32, tokens/s": (
        "mix-native-7B-nvfp4-r32-64x8-300to2048-seed0.json",
        "mix-vllm-7B-nvfp4-r32-64x8-300to2048-seed0.json",
    ),
    **{
        f"7B decode at {counts} sequences, tokens/s": (
            "decode-native-7B-nvfp4-r16-128x256.json",
            "decode-vllm-7B-nvfp4-r16-128x256.json",
            "decode-vllm-7B-bf16-r16-128x256.json",
        )
        for counts in ("1 / 8 / 32", "64 / 128 / 256")
    },
    "GRPO step of mixed lengths, 7B, 16 × 8 completions, half of the groups without a gradient, s": (
        "step-qerl-7B-nvfp4-r16-16x8-256x300to2048-equal0.5-auto.json",
        "unsloth-7B-bf16-r16-mixed.txt",
    ),
    "the same step beside TRL, s": (
        "step-qerl-7B-nvfp4-r16-16x8-256x300to2048-equal0.5-auto.json",
        "step-trl-7B-bf16-r16-16x8-256x300to2048-equal0.5-recompute.json",
    ),
    "GRPO step of 7B, 16 × 8 completions of 1,024 tokens, s": (
        "step-qerl-7B-nvfp4-r16-16x8-128x1024-auto.json",
        "step-trl-7B-bf16-r16-16x8-128x1024-recompute.json",
    ),
    "the same, if both recompute activations, s": (
        "step-qerl-7B-nvfp4-r16-16x8-128x1024-recompute.json",
        "step-trl-7B-bf16-r16-16x8-128x1024-recompute.json",
    ),
}


@pytest.mark.parametrize("work", OF_README)
def test_a_row_of_the_readme_states_the_peers_versions_the_host_and_who_recomputes(work):
    files = [PEERS / name for name in OF_README[work]]
    stamps = [json.loads(file.read_text())["provenance"] for file in files]
    [line] = [line for line in SPEED if line.startswith(f"| {work} |")]
    peer, condition = (line.split("|")[place].strip() for place in (3, 5))
    [host] = {stamp["machine"]["host"] for stamp in stamps}
    parts = condition.split("; ")
    assert parts[0] == host
    for name in ("unsloth", "vllm"):
        release = stamps[-1]["versions"].get(name, "").rpartition(".")[0]
        assert f"{name} {release}".strip() in peer.lower() or not release
    assert ("TRL 1.16" in peer) == (json.loads(files[-1].read_text()).get("system") == "TRL 1.16.0 BF16 LoRA")
    if "step" in work or "recompute" in work:
        ours, *_ = steps = [json.loads(file.read_text()) for file in files]
        ours_recomputes = ours["given_up"]["recomputed"] > 0
        trl, unsloth = steps[-1].get("settings", {}).get("recompute"), "asked" in steps[-1]
        assert trl or unsloth
        assert parts[1:] == ["both" if ours_recomputes else "TRL" if trl else "Unsloth"]


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    points = load(sorted(PEERS.glob("decode-*.json")), "decode")
    return points[(points["rank"] == 16) & (points["prompt"] == 128)]


@pytest.mark.parametrize(
    ("size", "counts"), [("7B", ("1", "8", "32")), ("7B", ("64", "128", "256")), ("32B", ("1", "8", "32", "64"))]
)
def test_decode_speeds_of_the_readme_are_those_of_the_workflow(points, size, counts):
    points = points[points["size"] == size]
    speeds = speed_tables.decode_table(points).set_index(["engine", "weights"])
    ratios = speed_tables.ratio_table(points).set_index(["weights", "against vLLM"])
    vllm = speeds.loc["vllm"].loc[["bf16", "nvfp4"]]
    asked = f"{size} decode at {' / '.join(counts)} sequences"
    assert readme_row(asked) == [
        [f"{speeds.loc[('native', 'nvfp4'), count]:,.0f}" for count in counts],
        [f"{max(vllm[count]):,.0f}" for count in counts],
        [f"{ratios.loc[('nvfp4', 'faster of BF16, NVFP4'), count]:.2f}" for count in counts],
    ]


@pytest.mark.parametrize(("above", "sizes"), [("Tokens/s (medians", ["7B"]), ("The larger sizes, r16", ["14B", "32B"])])
def test_decode_tables_of_the_page_of_the_h200_are_those_of_the_workflow(points, above, sizes):
    page = (ROOT / "docs/results/h200.md").read_text().split(f"\n{above}")[1]
    head, *rows = page.split("\n\n")[1].splitlines()
    shown = [re.findall(r"[\d,]+", row.split("|", 2)[2]) for row in rows if re.match(r"\| [^|]*, (NVFP4|BF16) \|", row)]
    counts, expected = re.findall(r"\d+", head), []
    for size in sizes:
        speeds = speed_tables.decode_table(points[points["size"] == size]).set_index(["engine", "weights"])
        for key in (("native", "nvfp4"), ("native", "bf16"), ("vllm", "nvfp4"), ("vllm", "bf16")):
            expected.append(
                [f"{speed:,.0f}" for speed in pd.to_numeric(speeds.loc[key].reindex(counts), "coerce").dropna()]
            )
    assert shown == expected


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("7B", "Qwen2.5-7B, for comparison"),
        ("mistral-7b", "Mistral 7B"),
        ("gemma-3-12b", "Gemma 3 12B"),
        ("qwen3.5-27b", "Qwen3.5-27B, with BF16 delta nets"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_ratios_of_other_families_in_the_readme_are_those_of_the_workflow(size, name):
    key = ("mxfp4", "MXFP4") if size == "gpt-oss-20b" else ("nvfp4", "faster of BF16, NVFP4")
    folders = [PEERS] if size == "7B" else FAMILIES
    assert readme_row(f"{name} |")[1] == family_ratios(size, key, ("1", "8", "32", "128"), folders)


def family_ratios(size, key, counts, folders=FAMILIES):
    """Ratios to vLLM's speed as the README has them."""
    points = load([file for file in committed_files(folders) if file.name.startswith("decode-")], "decode")
    points = points[(points["rank"] == 16) & (points["size"] == size)]
    ratios = speed_tables.ratio_table(points).set_index(["weights", "against vLLM"])
    return [f"{ratios.loc[key, count]:.2f}" for count in counts]


def test_ratios_of_packed_delta_nets_in_the_readme_are_those_of_the_workflow():
    ratios = family_ratios("qwen3.5-27b", ("nvfp4-delta-nets", "NVFP4-DELTA-NETS"), ("1", "8", "32"))
    assert readme_row("Qwen3.5-27B, with packed delta nets")[1] == ratios


def test_the_mixture_of_the_readme_has_its_most_and_its_least_ratio():
    key, text = ("nvfp4", "faster of BF16, NVFP4"), (ROOT / "README.md").read_text()
    every = family_ratios("qwen3-30b-a3b", key, ("1", "8", "32", "128"), FAMILIES[:1])
    [h100] = family_ratios("qwen3-30b-a3b", key, ("32",), FAMILIES[1:])
    assert f"decodes {max(every)} to {min(every)} times as fast as vLLM 0.24" in text
    assert f"on an H100 at 32 sequences {h100} times" in text


@pytest.mark.parametrize("counts", [(1, 8, 32), (64, 128, 256)])
def test_speeds_of_the_portable_kernels_are_those_of_the_workflow(counts):
    points = load(sorted(CARDS.glob("decode-*.json")), "decode")
    speeds = speed_tables.decode_table(points[(points["rank"] == 16) & (points["size"] == "7B")])
    speeds = speeds.set_index(["engine", "weights"])[[*map(str, counts)]]
    ours, vllm = speeds.loc[("native-portable", "nvfp4")], speeds.loc["vllm"].loc[["nvfp4", "bf16"]].max()
    work = "7B decode with the portable kernels" + (", which serve other GPUs," if 1 in counts else "")
    assert readme_row(f"{work} at {' / '.join(map(str, counts))} sequences") == [
        [f"{speed:,.0f}" for speed in ours],
        [f"{speed:,.0f}" for speed in vllm],
        [f"{ratio:.2f}" for ratio in ours / vllm],
    ]


def test_the_rollout_of_the_readme_is_that_of_the_workflow():
    mixes = load(sorted(PEERS.glob("mix-*.json")), "rollout_mix")
    for asked, traced in (("mixed lengths", False), ("short completions", True)):
        alike = (mixes["size"] == "7B") & ((mixes["trace"] != "") == traced)
        rows = mix_table(mixes[alike]).set_index(["engine", "weights"])
        ours, theirs = rows.loc[("native", "nvfp4")], rows.loc["vllm"].sort_values("tokens_per_second").iloc[-1]
        speeds = [f"{row['tokens_per_second']:,.0f}" for row in (ours, theirs)]
        assert readme_row(f"7B rollout of {asked}") == [[speeds[0]], [speeds[1]], [f"{ours['speedup']:.2f}"]]
    table = mix_table(mixes).set_index(["engine", "weights", "size"]).sort_index()
    for size, faster in (("8B", "nvfp4"), ("32B", "bf16")):
        ours, theirs = table.loc[("native", "nvfp4", size)], table.loc[("vllm", faster, size)]
        speeds = [[f"{row['tokens_per_second']:,.0f}"] for row in (ours, theirs)]
        assert readme_row(f"64 × 8 of {size}") == [*speeds, [f"{ours['speedup']:.2f}"]]


def test_the_heavy_tail_of_the_readme_is_that_of_its_samples():
    tailed = load(sorted(PEERS.parent.glob("shapes/mix-*tail*.json")), "rollout_mix").set_index(["engine", "weights"])
    ours, theirs = median(tailed.loc[("native", "nvfp4"), "samples"]), max(map(median, tailed.loc["vllm", "samples"]))
    assert readme_row("32 × 16 of 7B") == [[f"{ours:,.0f}"], [f"{theirs:,.0f}"], [f"{ours / theirs:.2f}"]]
    assert readme_row("64 × 8 of 8B")[2] == [f"{ours / theirs:.2f}"]
    assert f"and 8B's have {ours / theirs:.2f} times vLLM 0.33's speed" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("work", "samples"),
    [("32 × 16 of 7B", "shapes/mix-*tail*.json"), ("64 × 8 of 8B", "peers/mix-*-8B-*.json")],
    ids=["heavy tail", "8B"],
)
def test_a_rollout_and_its_peers_are_of_the_host_and_the_version_that_the_row_states(work, samples):
    stamps = [json.loads(file.read_text())["provenance"] for file in PEERS.parent.glob(samples)]
    [line] = [line for line in SPEED if line.startswith(f"| {work} ")]
    _, _, _, peer, _, host, _ = (cell.strip() for cell in line.split("|"))
    assert {stamp["machine"]["host"] for stamp in stamps} == {host}
    assert {stamp["versions"]["vllm"] for stamp in stamps if "vllm" in stamp["versions"]} == {"0.33.0"}
    assert peer.startswith("vLLM 0.33, ")


def test_the_step_of_the_readme_is_that_of_the_workflow():
    def seconds(size, lengths):
        """Our step and TRL's with its correction, median seconds."""
        steps = load(sorted(PEERS.glob(f"step-*-{size}-*-16x8-{lengths}*.json")), "grpo_step")
        uncapped = (steps["recompute"] == "auto") & (steps["cap"] == "")
        [ours] = steps[uncapped & (steps["equal_groups"] == (0.5 if "to" in lengths else 0))]["samples"]
        [trl] = steps[(steps["system"] == "TRL 1.16.0 BF16 LoRA")]["samples"]
        return median(ours), median(trl)

    def row(ours, theirs):
        return [[f"{ours:.1f}"], [f"{theirs:.1f}"], [f"{theirs / ours:.2f}"]]

    for size in ("7B", "14B"):
        assert readme_row(f"GRPO step of {size}, 16") == row(*seconds(size, "128x1024"))
    [again] = load([PEERS / "step-qerl-7B-nvfp4-r16-16x8-128x1024-recompute.json"], "grpo_step")["samples"]
    assert readme_row("the same, if both") == row(median(again), seconds("7B", "128x1024")[1])
    ours, trl = seconds("7B", "256x300to2048")
    assert readme_row("the same step beside TRL") == row(ours, trl)
    measured = json.loads((PEERS / "unsloth-7B-bf16-r16-mixed.txt").read_text())["runs"][0]["steps"]
    unsloth = median(step["seconds"] for step in measured if not step["warm_up"])
    assert readme_row("GRPO step of mixed lengths, 7B") == row(ours, unsloth)


def test_the_memory_of_the_readme_is_the_least_cap_that_passed():
    files = [file for folder in (PEERS, CARDS, OF_H100) for file in sorted(folder.glob("step-qerl-*gb.json"))]
    steps = load(files, "grpo_step")
    passed = steps[steps["status"] == "ok"]
    least = [
        min(passed[passed["size"] == size]["cap"], key=lambda cap: float(cap.split()[0]))
        for size in ("7B", "8B", "14B", "32B")
    ]
    assert readme_row("memory cap under which 7B / 8B / 14B / 32B")[0] == [cap.removesuffix(" GB") for cap in least]


def test_the_step_on_two_gpus_is_that_of_the_committed_runs():
    alone, both = (
        median(row["seconds/step"] for row in map(json.loads, (RESULTS / name / METRICS).open()) if row["step"] > 1)
        for name in ("7b-1", "7b-2")
    )
    ratio = alone / both
    assert readme_row("on two GPUs: GRPO step of 7B") == [[f"{both:.1f}"], [f"{alone:.1f}"], [f"{ratio:.2f}"]]
    assert page() == PAGE.read_text()
