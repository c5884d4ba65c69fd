"""Prompts as people write them: long, in many scripts, with quotes and line noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runs import Run

from relax_sdk.data import load_prompts

Train = Callable[..., Run]

WRITTEN_HERE = (
    'A storefront at dusk with the neon sign "OPEN 24/7 – café & noodles", rain on the pavement, long exposure',
    "一只红色的熊猫坐在茶杯里，水彩画风格",
    "Ein rotes Quadrat über einem grünen Dreieck; Hintergrund: grau",
    "🟥 ▲ 🔵 — three shapes, left to right",
    "a poster that reads " + " ".join(f"line {i}: the quick brown fox" for i in range(60)),
    "x",
    "  two  spaces   and a tab\tinside ",
    "cafe\u0301 with a combining accent",
)
FILES = "TEST_PROMPT_FILES"
"""Further prompt files, e.g. a benchmark's own, separated by the system's path separator."""
TAKEN = 8
"""Prompts of each of them."""


def test_a_round_and_an_update_with_each(train: Train, tmp_path: Path) -> None:
    prompts = list(WRITTEN_HERE)
    for name in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        prompts += [record.prompt for record in load_prompts(name, task="t2i")[:TAKEN]]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    rounds = len(prompts) // 4
    run = train("--prompt-data", str(path), "--rollout-batch-size", "4", "--num-rollout", str(rounds))
    assert run.code == 0, run.stderr
    assert run.series("reward/num_groups") == [4] * rounds
    assert run.series("train/optimizer_steps") == [2.0 * (round + 1) for round in range(rounds)]
    assert run.series("train/first_update_ratio_max_deviation") == [0.0] * rounds
    assert sum(run.series("reward/truncated_prompts")) >= 1  # the poster has more than CLIP's 77 tokens
