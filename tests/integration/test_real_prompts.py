"""Prompts as people write them: long, in many scripts, with quotes and line noise; each file runs a full round."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run

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
"""Extra prompt files, e.g. a benchmark's own, separated by the system's path separator."""
EXTRA = "RELAX_TEST_PROMPT_FILES"
FILES = [Path(name) for name in os.environ.get(EXTRA, "").split(os.pathsep) if name]


def check(run: Run) -> None:
    assert run.code == 0, run.stderr
    assert run.series("train/optimizer_steps") == [2.0, 4.0]
    assert run.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]


def test_prompts_in_many_scripts(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(WRITTEN_HERE) + "\n", encoding="utf-8")
    run = train("--prompt-data", str(path), "--rollout-batch-size", "4")
    check(run)
    assert sum(run.series("reward/truncated_prompts")) >= 1  # the poster has more than CLIP's 77 tokens
    assert run.series("reward/num_groups") == [4, 4]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_given_prompt_file(train: Train, path: Path) -> None:
    check(train("--prompt-data", str(path), "--rollout-batch-size", "8"))
