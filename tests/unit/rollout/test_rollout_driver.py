"""The driver with a made-up fleet: waves, order, what it writes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_family import CHANNELS, SCHEDULER, SIDE, TOKENS, TinyAdapter

from relax_sdk.errors import RolloutError
from relax_sdk.protocols import PromptRecord, RolloutRequest, RolloutResponse, SamplingConfig
from relax_sdk.rollout import RolloutDriver, read_sidecar

STEPS = 4
Change = Callable[[RolloutRequest, dict[str, Any]], dict[str, Any]]


def prompts(count: int) -> list[PromptRecord]:
    return [PromptRecord(prompt=f"prompt {n}", prompt_id=f"p{n}", metadata={"n": n}) for n in range(count)]


class FakeFleet:
    """Engines that answer at once; every pixel of candidate k of group g is 16 g + k."""

    def __init__(self, size: int = 1, change: Change | None = None) -> None:
        self.size = size
        self.change = change or (lambda request, fields: fields)
        self.waves: list[list[list[int]]] = []

    def generate(self, assignments: Sequence[Sequence[RolloutRequest]]) -> list[list[RolloutResponse]]:
        self.waves.append([[request.plan.group_index for request in share] for share in assignments])
        return [
            [self.answer(request, f"engine-{engine}") for request in share] for engine, share in enumerate(assignments)
        ]

    def answer(self, request: RolloutRequest, engine: str) -> RolloutResponse:
        count, group = len(request.plan.sample_ids), request.plan.group_index
        generator = torch.Generator().manual_seed(group)
        shades = (16 * group + torch.arange(count)).to(torch.uint8).reshape(count, 1, 1, 1)
        fields = {
            "trajectory_latents": torch.randn(count, STEPS + 1, TOKENS, CHANNELS, generator=generator),
            "sigmas": torch.tensor(request.sigmas),
            "timesteps": torch.tensor(request.sigmas[:-1]) * 1000,  # type: ignore[index]
            "rollout_log_probs": torch.randn(count, STEPS, generator=generator),
            "sde_indices": request.plan.sde_indices,
            "conditions": {"encoder_hidden_states": torch.full((2, 1), float(group))},
            "media": {"image": shades.expand(count, 3, SIDE, SIDE)},
            "height": SIDE,
            "width": SIDE,
            "policy_version": request.plan.policy_version,
            "engine": engine,
            "truncated_prompts": group % 2,
        }
        return RolloutResponse(**self.change(request, fields))


def driver(
    fleet: Any, root: Path, *, adapter: Any = None, sampling: dict[str, Any] | None = None, **changes: Any
) -> RolloutDriver:
    config = {"num_inference_steps": STEPS, "sde_indices": (1, 2), **(sampling or {})}
    options = {"task": "t2i", "generation_seed": 42, **changes}
    return RolloutDriver(
        adapter=adapter or TinyAdapter(),
        sampling=SamplingConfig(**config),
        scheduler_config=SCHEDULER,
        fleet=fleet,
        artifact_root=root,
        **options,
    )


def rollout(fleet: Any, root: Path, count: int = 5, *, rollout_id: int = 0, **changes: Any) -> Any:
    progress = changes.pop("progress", None)
    return driver(fleet, root, **changes).rollout(
        prompts(count), rollout_id=rollout_id, samples_per_prompt=3, policy_version=7, progress=progress
    )


@pytest.mark.parametrize(("size", "wave"), [(1, 0), (1, 2), (2, 1), (2, 2), (3, 0), (8, 1)])
def test_order_and_files_do_not_depend_on_waves_and_engines(tmp_path: Path, size: int, wave: int) -> None:
    fleet, seen = FakeFleet(size), []
    batch = rollout(fleet, tmp_path, wave_size=wave, progress=lambda done, total: seen.append((done, total)))
    assert [group.group_index for group in batch.groups] == [0, 1, 2, 3, 4]
    assert [group.prompt.prompt for group in batch.groups] == [f"prompt {n}" for n in range(5)]
    for group in batch.groups:
        assert group.media["image"][:, 0, 0, 0].tolist() == [16 * group.group_index + slot for slot in range(3)]
        stored = read_sidecar(group.sidecar)
        assert stored.group_index == group.group_index
        assert stored.conditions["encoder_hidden_states"][0, 0].item() == group.group_index
    folder = tmp_path / "t2i" / "rollout_0000000"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"group_{n:08d}.safetensors" for n in range(5)]
        + [f"group_{n:08d}_sample_{slot:04d}.png" for n in range(5) for slot in range(3)]
    )
    # Each wave gives an engine at most `wave` groups, no engine two more than another, each group once.
    groups = [group for shares in fleet.waves for share in shares for group in share]
    assert sorted(groups) == [0, 1, 2, 3, 4]
    for shares in fleet.waves:
        assert len(shares) == size
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert wave == 0 or max(sizes) <= wave
    expected_waves = 1 if wave == 0 else -(-5 // (wave * size))
    assert len(fleet.waves) == expected_waves
    assert seen[-1] == (5, 5)
    assert len(seen) == expected_waves


def test_the_batch_says_what_it_is(tmp_path: Path) -> None:
    batch = rollout(FakeFleet(2), tmp_path)
    assert (batch.rollout_id, batch.policy_version, batch.sde_indices, batch.samples_per_prompt) == (0, 7, (1, 2), 3)
    assert batch.truncated_prompts() == 2


def test_media_is_paired_with_its_own_prompt(tmp_path: Path) -> None:
    scored = rollout(FakeFleet(3), tmp_path, wave_size=1).reward_batch()
    assert len(scored.prompts) == 15
    for row, prompt in enumerate(scored.prompts):
        group, slot = divmod(row, 3)
        assert prompt == f"prompt {group}"
        assert scored.metadata[row] == {"n": group}
        assert scored.tracks["image"][row].unique().tolist() == [16 * group + slot]


def test_the_steps_of_the_round_are_drawn_once_for_all(tmp_path: Path) -> None:
    resample = {"sde_resample_per_rollout": True, "num_sde_steps": 2, "sde_pool": (1, 2, 3)}
    drawn = set()
    for rollout_id in range(6):
        batch = rollout(FakeFleet(2), tmp_path, rollout_id=rollout_id, sampling=resample, retention=0)
        steps = {tuple(read_sidecar(group.sidecar).sde_indices.tolist()) for group in batch.groups}
        assert steps == {batch.sde_indices}
        drawn.add(batch.sde_indices)
    assert len(drawn) > 1


def test_a_trajectory_keeps_the_states_around_each_trained_step(tmp_path: Path) -> None:
    """T + 1 latents in: x_i and x_{i+1} of every SDE step out."""
    batch = rollout(FakeFleet(), tmp_path, 1, sampling={"sde_indices": (0, 2)})
    states = torch.randn(3, STEPS + 1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    stored = read_sidecar(batch.groups[0].sidecar)
    assert torch.equal(stored.latents, states[:, [0, 2]])
    assert torch.equal(stored.next_latents, states[:, [1, 3]])
    assert stored.policy_version == 7


def test_no_sde_step_is_refused_before_anything_runs(tmp_path: Path) -> None:
    fleet = FakeFleet()
    with pytest.raises(RolloutError, match="no SDE step") as caught:
        rollout(fleet, tmp_path, sampling={"sde_indices": None, "num_sde_steps": 0})
    assert "sampling-config" in str(caught.value)
    assert fleet.waves == []
    assert list(tmp_path.iterdir()) == []


def changed(field: str, value: Any, group: int = 3) -> Change:
    def change(request: RolloutRequest, fields: dict[str, Any]) -> dict[str, Any]:
        new = value(fields[field]) if callable(value) else value
        return {**fields, field: new} if request.plan.group_index == group else fields

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("policy_version", 6), "policy version"),
        (changed("sigmas", lambda sigmas: torch.cat([sigmas[1:], sigmas[-1:]])), "off by one"),
        (changed("sigmas", lambda sigmas: sigmas * 1.001), "step 0"),
        (changed("media", {}), "image"),
        (changed("media", lambda media: {"video": media["image"]}), "image"),
    ],
    ids=["policy version", "schedule off by one", "other schedule", "no media", "wrong track"],
)
def test_a_response_that_does_not_fit_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        rollout(FakeFleet(2, change), tmp_path)
    assert "group 3" in str(caught.value)
    assert "engine-1" in str(caught.value)
    folder = tmp_path / "t2i" / "rollout_0000000"
    assert not list(folder.glob("group_00000003*")), "nothing of the refused group is written"


def test_the_adapter_has_a_say(tmp_path: Path) -> None:
    class Strict(TinyAdapter):
        def validate_rollout_response(self, request: RolloutRequest, response: RolloutResponse) -> None:
            if request.plan.group_index == 2:
                raise RolloutError("not mine")

    with pytest.raises(RolloutError, match="not mine"):
        rollout(FakeFleet(), tmp_path, adapter=Strict())
    assert not list((tmp_path / "t2i" / "rollout_0000000").glob("group_00000002*"))


@pytest.mark.parametrize("drop", [1, -1])
def test_an_engine_that_answers_the_wrong_number_is_named(tmp_path: Path, drop: int) -> None:
    class Forgetful(FakeFleet):
        def generate(self, assignments: Sequence[Sequence[RolloutRequest]]) -> list[list[RolloutResponse]]:
            answers = super().generate(assignments)
            answers[1] = answers[1][:-1] if drop > 0 else [*answers[1], answers[1][0]]
            return answers

    with pytest.raises(RolloutError, match="engine 1"):
        rollout(Forgetful(2), tmp_path)
    assert not (tmp_path / "t2i").exists()


def test_old_rounds_are_pruned_when_a_round_starts(tmp_path: Path) -> None:
    for rollout_id in range(4):
        rollout(FakeFleet(), tmp_path, 1, rollout_id=rollout_id, retention=2)
    names = sorted(path.name for path in (tmp_path / "t2i").iterdir())
    assert names == ["rollout_0000002", "rollout_0000003"]


def test_evaluation_is_ode_writes_images_only_and_repeats_its_noise(tmp_path: Path) -> None:
    asked: list[RolloutRequest] = []

    def note(request: RolloutRequest, fields: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return fields

    run = driver(FakeFleet(2, note), tmp_path)
    for step, version in ((0, 0), (10, 20)):
        batch = run.evaluate(prompts(3), step=step, samples_per_prompt=2, policy_version=version)
        assert batch.rollout_id is None
        assert batch.sde_indices == ()
        assert all(group.sidecar is None for group in batch.groups)
        folder = tmp_path / "eval" / "t2i" / f"rollout_{step:07d}"
        assert sorted(path.suffix for path in folder.iterdir()) == [".png"] * 6
    assert all(request.plan.sde_indices == () for request in asked)
    before = sorted((request.plan.group_index, request.plan.initial_noise_seeds) for request in asked[:3])
    after = sorted((request.plan.group_index, request.plan.initial_noise_seeds) for request in asked[3:])
    assert before == after
    assert not (tmp_path / "t2i").exists()
