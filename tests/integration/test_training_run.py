"""One run from the command line: what it leaves, what it reports, and that it repeats itself."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from PIL import Image
from runs import Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_sdk.rollout import read_sidecar

Train = Callable[..., Run]
TIMES = ("perf/", "reward/score_")


def test_a_run_leaves_its_folder(plain: Run) -> None:
    run = plain
    assert run.stdout.strip() == str(run.run_dir)
    assert "Traceback" not in run.stderr
    assert [line.split()[1] for line in run.stderr.splitlines() if line.startswith("rollout ")] == ["1/2", "2/2"]

    recipe = json.loads((run.run_dir / "recipe.json").read_text())
    assert recipe["config"]["rollout"]["global_batch_size"] == 8
    assert recipe["provenance"]["rollout.n_samples_per_prompt"] == "flag --n-samples-per-prompt"
    for name in ("samples.png", "curve.png"):
        with Image.open(run.run_dir / name) as picture:
            assert picture.width > 300
    events = EventAccumulator(str(run.run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]

    task = run.run_dir / "artifacts" / "t2i"
    assert [path.name for path in sorted(task.iterdir())] == ["rollout_0000001"]
    files = sorted(path.name for path in (task / "rollout_0000001").iterdir())
    assert files[0] == "group_00000000.safetensors"
    assert files[1] == "group_00000000_sample_0000.png"
    assert len(files) == 2 * (1 + 4)
    assert read_sidecar(task / "rollout_0000001" / files[0]).policy_version == 1
    assert len(list((run.run_dir / "artifacts" / "eval" / "t2i").rglob("*.png"))) == 2 * 3

    # The replay is bit for bit the same forward, before any optimizer step; afterwards the policy has moved.
    assert run.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]
    assert min(run.series("train/ratio_max_deviation")) > 0.0
    assert max(run.series("train/logp_parity_max")) < 2e-5
    assert run.series("train/optimizer_steps") == [2.0, 4.0]
    assert run.series("train/policy_version") == [1.0, 2.0]
    assert len(run.series("eval/few/pickscore_mean")) == 2
    assert run.series("eval/few/pickscore_delta_mean") != [0.0]


def test_two_runs_with_one_seed_are_identical(plain: Run, train: Train) -> None:
    again = train()
    assert again.code == 0, again.stderr
    timeless = [
        [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in run.records()]
        for run in (plain, again)
    ]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) == 4  # an evaluation, two rollouts, an evaluation


def test_two_ranks_train_as_one(plain: Run, two_ranks: Run) -> None:
    """Same candidates from two engines as from one, same loss, same update."""
    one, two = plain, two_ranks
    # The loss is a mean of terms of the size of an advantage, about 1, that all but cancel; it is compared to float32's
    # rounding of those terms.
    assert two.series("train/loss") == pytest.approx(one.series("train/loss"), abs=3e-7)
    assert two.series("train/grad_norm") == pytest.approx(one.series("train/grad_norm"), rel=1e-4)
    # The second rollout is sampled with the updated weights. AdamW's first steps are close to the sign of each gradient
    # element, so rounding decides where one is nearly 0; the unit tests compare the weights themselves.
    assert two.series("reward/pickscore_mean") == pytest.approx(one.series("reward/pickscore_mean"), rel=1e-3)
    assert two.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--lora-merge-mode",), id="lora-merged"),
        pytest.param(("--fsdp-trainable-mode", "full", "--lora-rank", "0", "--lora-merge-mode"), id="full"),
    ],
)
def test_full_weight_sync(train: Train, flags: tuple[str, ...]) -> None:
    """Every weight goes to the engine: its samples of round 2 are then replayed without a gap."""
    run = train(*flags)
    assert run.code == 0, run.stderr
    assert run.series("train/weight_sync_tensors")[0] > 100
    assert max(run.series("train/logp_parity_max")) < 2e-5
    assert run.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]
