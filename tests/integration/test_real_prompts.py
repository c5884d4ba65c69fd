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
EXTRA = "TEST_PROMPT_FILES"
"""Further prompt files, e.g. a benchmark's own, separated by the system's path separator."""
FILES = [Path(name) for name in os.environ.get(EXTRA, "").split(os.pathsep) if name]


def prompt_files() -> list[Path | None]:
    """The prompts above (None), and every given file."""
    return [None, *FILES]


@pytest.mark.parametrize("given", prompt_files(), ids=lambda path: path.stem if path else "many_scripts")
def test_a_round_and_an_update(train: Train, tmp_path: Path, given: Path | None) -> None:
    path = given or tmp_path / "prompts.txt"
    if given is None:
        path.write_text("\n".join(WRITTEN_HERE) + "\n", encoding="utf-8")
    run = train("--prompt-data", str(path), "--rollout-batch-size", "4")
    assert run.code == 0, run.stderr
    assert run.series("reward/num_groups") == [4, 4]
    assert run.series("train/optimizer_steps") == [2.0, 4.0]
    assert run.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]
    if given is None:
        assert sum(run.series("reward/truncated_prompts")) >= 1  # the poster has more than CLIP's 77 tokens
