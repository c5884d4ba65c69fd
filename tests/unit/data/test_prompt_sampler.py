from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from relax_sdk.data import PromptSampler
from relax_sdk.errors import ConfigError, DataError
from relax_sdk.protocols import PromptRecord


def records(count: int) -> list[PromptRecord]:
    return [PromptRecord(prompt=f"prompt {index}", prompt_id=str(index)) for index in range(count)]


def drawn(count: int, batch_size: int, rollouts: int, seed: int = 42) -> list[list[int]]:
    sampler = PromptSampler(records(count), batch_size=batch_size, seed=seed)
    return [[int(item.prompt_id) for item in sampler.batch(rollout)] for rollout in range(rollouts)]


@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (10, 4), (7, 3), (8, 4), (5, 5), (3, 8), (1, 2), (9, 4)])
def test_every_epoch_draws_every_prompt_once(count: int, batch_size: int) -> None:
    epochs = 2 * batch_size
    flat = [index for batch in drawn(count, batch_size, epochs * count // batch_size) for index in batch]
    for epoch in range(epochs):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))


@pytest.mark.parametrize(("count", "batch_size"), [(8, 4), (9, 4), (11, 5), (10, 5), (23, 7), (21, 8)])
def test_no_batch_repeats_a_prompt_given_two_batches_of_them(count: int, batch_size: int) -> None:
    for seed in range(20):
        for batch in drawn(count, batch_size, 60, seed):
            assert len(set(batch)) == batch_size


def test_a_batch_is_a_pure_function_of_seed_and_rollout() -> None:
    sampler = PromptSampler(records(11), batch_size=4, seed=1)
    straight = [sampler.batch(rollout) for rollout in range(30)]
    resumed = PromptSampler(records(11), batch_size=4, seed=1)
    assert [resumed.batch(rollout) for rollout in reversed(range(30))] == straight[::-1]
    assert [PromptSampler(records(11), batch_size=4, seed=2).batch(rollout) for rollout in range(30)] != straight


def test_epochs_are_shuffled_evenly() -> None:
    first = Counter(drawn(6, 6, 1, seed)[0][0] for seed in range(600))
    assert len(first) == 6
    assert max(first.values()) < 150  # 100 expected, standard deviation 9
    epochs = {tuple(batch) for batch in drawn(6, 6, 40)}
    assert len(epochs) > 35


def test_the_order_is_the_same_on_every_machine() -> None:
    # printf 42/0/<index> | sha256sum, sorted by digest; then 42/1/<index>.
    assert drawn(8, 3, 4) == [[6, 7, 2], [3, 0, 5], [4, 1, 2], [0, 4, 5]]


def test_bad_arguments() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptSampler([], batch_size=1, seed=0)
    with pytest.raises(ConfigError, match="rollout_batch_size is 0"):
        PromptSampler(records(1), batch_size=0, seed=0)
    with pytest.raises(ValueError, match="negative"):
        PromptSampler(records(1), batch_size=1, seed=0).batch(-1)


@pytest.mark.parametrize("room", ["relax_sdk.data", "relax_sdk.metrics"])
def test_importing_loads_no_torch(room: str) -> None:
    code = f"import sys, {room}; print([name for name in sys.modules if name in {{'torch', 'numpy', 'matplotlib'}}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
