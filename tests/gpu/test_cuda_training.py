"""The same runs on CUDA: NCCL, bf16, the scorer beside the engine."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from runs import Run

Train = Callable[..., Run]
BF16 = ("--fsdp-param-dtype", "bf16", "--weight-sync-wire-dtype", "bf16", "--rollout-engine-dtype", "bf16")


def resource(count: int) -> tuple[str, ...]:
    return ("--resource", json.dumps({"actor": [1, count], "rollout": [1, count]}), "--reward-runtime", "colocate")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [(), BF16], ids=["fp32", "bf16"])
def test_one_device(train: Train, dtype: tuple[str, ...]) -> None:
    run = train(*resource(1), *dtype)
    assert run.code == 0, run.stderr
    assert run.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]
    # A healthy mean is 2e-5 to 6e-5 in bf16; a schedule off by one gives 5e-3.
    assert max(run.series("train/logp_parity_mean")) < 1e-4


@pytest.mark.gpu(2)
def test_two_devices_train_as_one(train: Train) -> None:
    one, two = train(*resource(1), name="one"), train(*resource(2), name="two")
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    for name in ("train/loss", "train/grad_norm"):
        assert two.series(name) == pytest.approx(one.series(name), rel=1e-3, abs=1e-9), name
