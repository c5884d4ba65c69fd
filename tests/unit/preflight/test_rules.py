"""Every rule, by the configuration that breaks it; a value of ``...`` leaves a field out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import product

import pytest

from relax_sdk import RewardSpec, hookimpl
from relax_sdk.config import resolve
from relax_sdk.errors import PluginError, PreflightError, UnknownNameError
from relax_sdk.metrics import METRICS, find_metric
from relax_sdk.preflight import check
from relax_sdk.preflight.reward import RESERVED_COMPONENTS
from relax_sdk.preflight.sampling import _cure
from relax_sdk.protocols import SamplingConfig
from relax_sdk.registry import Registry
from relax_sdk.registry.loading import PluginEntry

LORA = {"fsdp.trainable_mode": "lora", "lora.rank": 4, "fsdp.master_dtype": "fp32"}
SDE = "sampling.sampling_config"
EMBEDDED = "relax_sdk.rollout.local.LocalEngine"

BROKEN = [
    ({"model.generation_task": "t2v"}, "expected one of t2i; did you mean 't2i'"),
    ({"run.plugin": ...}, "give --plugin NAME"),
    ({"model.model_path": ...}, "give --model-path"),
    ({"model.model_path": "/nowhere/at/all"}, "no such folder"),
    ({"model.model_path": "Qwen/Qwen-Image"}, "hf download Qwen/Qwen-Image"),
    ({"fsdp.trainable_mode": "lora"}, "give --lora-rank above 0"),
    ({"lora.rank": 4}, "give --fsdp-trainable-mode lora"),
    ({**LORA, "lora.dropout": 0.1}, "--lora-dropout is 0.1"),
    ({**LORA, "fsdp.cpu_offload": True}, "--fsdp-cpu-offload is True"),
    ({**LORA, "lora.target_modules": []}, "--lora-target-modules is []"),
    ({**LORA, "lora.adapter_mode": True, "weight_sync.mode": "full"}, "--weight-sync-mode is 'full'"),
    ({**LORA, "weight_sync.mode": "adapter"}, "give --lora-adapter-mode"),
    ({"lora.adapter_mode": True}, "full training has no adapter"),
    ({"weight_sync.mode": "adapter"}, "full training sends full weights"),
    ({SDE: {"sde_indices": [0, 3]}}, "step 0 could be trained"),
    ({SDE: {"sde_resample_per_rollout": True, "num_sde_steps": 2, "sde_pool": [0, 1, 2]}}, "sde_pool is (0, 1, 2)"),
    ({SDE: {"num_sde_steps": 3, "sde_timestep_fraction": [0.0, 0.5]}}, "step 0 could be trained"),
    ({SDE: {"sde_indices": [11]}}, "the last step, 11 of 0..11"),
    ({SDE: {"sde_indices": [11], "sde_type": "dance"}}, "the last step"),
    ({SDE: {}}, "no SDE step is configured"),
    ({SDE: {"sde_resample_per_rollout": True, "sde_pool": [1, 2]}}, "give num_sde_steps above 0"),
    ({SDE: {"sde_indices": [1], "guidance_scale": 4.0}}, "guidance_scale is 4.0"),
    ({SDE: {"sde_indices": [1], "driver_sigmas": False}}, "has no other schedule"),
    ({SDE: {"sde_indices": [1], "driver_xt": False}}, "driver_xt is False"),
    ({SDE: {"sde_indices": [1], "driver_xt": False}, "rollout.rollout_engine": "a.b:C"}, "driver_xt is False"),
    ({SDE: {"num_sde_steps": 4, "sde_timestep_fraction": [0.25, 0.5]}}, "leaves only 3 of the 12 steps"),
    ({SDE: {"sde_indices": [1], "sde_resample_per_rollout": True}}, "give num_sde_steps above 0"),
    ({SDE: {"sde_indices": [1], "sde_type": "cps", "eta": 1.1}}, "eta is 1.1"),
    ({"lora.alpha": 8.0}, "--lora-alpha is 8.0"),
    ({"lora.dropout": 0.1}, "--lora-dropout is 0.1"),
    ({"lora.target_modules": ["to_q"]}, "--lora-target-modules is ['to_q']"),
    ({"fsdp.param_dtype": "fp32", "weight_sync.wire_dtype": "fp32"}, "give --rollout-engine-dtype fp32"),
    ({"backend.resource": {"actor": [2, 1], "rollout": [2, 1]}}, "several nodes need a Ray cluster over them"),
    ({"backend.resource": {"actor": [1, 2], "rollout": [2, 1]}}, "so they have the same nodes"),
    ({"rollout.eval_prompt_data": ("held/out", "eval.txt")}, "names the set 'held/out'"),
    ({"rollout.eval_prompt_data": ("", "eval.txt")}, "names the set ''"),
    ({"reward.scorer_path": "a.b:C", "reward.component_weights": {"a b": 1}}, "has the component 'a b'"),
    ({"reward.scorer_path": "a.b:C", "reward.component_weights": {"group_std": 1}}, "reward/group_std_mean"),
    ({"reward.scorer_path": "a.b:C", "reward.required_components": ["advantage"]}, "reward/advantage_mean"),
    ({SDE: {"sde_indices": [1], "sigma_max": 0.95}}, "clamp to the second sigma"),
    ({SDE: {"sde_indices": [1], "height": 70}}, "the nearest valid one is 64"),
    ({"weight_sync.wire_dtype": "fp32"}, "expected 'bf16'"),
    ({"fsdp.param_dtype": "fp32", "rollout.rollout_engine_dtype": "fp32"}, "expected 'fp32'"),
    ({"backend.fully_async": True}, "--fully-async"),
    ({"backend.hybrid": True}, "--hybrid"),
    ({"backend.offload_train": True, "fsdp.cpu_offload": True}, "there is nothing to offload"),
    ({"backend.colocate": False}, "give --colocate"),
    ({"flow_grpo.kl_coef": 0.1}, "--kl-coef is 0.1"),
    ({"flow_grpo.use_kl_loss": True}, "--use-kl-loss"),
    ({"rollout.rollout_num_gpus_per_engine": 0}, "expected at least 1"),
    (
        {
            "rollout.rollout_num_gpus_per_engine": 3,
            "rollout.rollout_engine": "some.module:Engine",
            "backend.resource": {"actor": [1, 4], "rollout": [1, 4]},
        },
        "4 ranks are not divisible",
    ),
    (
        {
            "rollout.rollout_num_gpus_per_engine": 2,
            "backend.resource": {"actor": [1, 4], "rollout": [1, 4]},
        },
        "'local' uses at most 1",
    ),
    (
        {
            "rollout.rollout_num_gpus_per_engine": 2,
            "rollout.rollout_engine": EMBEDDED,
            "backend.resource": {"actor": [1, 4], "rollout": [1, 4]},
        },
        "'local' uses at most 1",
    ),
    ({SDE: {"sde_indices": [1], "driver_sigmas": False}, "rollout.rollout_engine": EMBEDDED}, "has no other schedule"),
    ({"rollout.rollout_engine_args": "--attention-backend fa"}, "'local' has no server of its own"),
    (
        {"rollout.rollout_engine_args": '"--port', "rollout.rollout_engine": "some.module:Engine"},
        "cannot be split into arguments",
    ),
    ({"backend.resource": {"actor": [1, 4], "rollout": [1, 2]}}, "must be the rollout's 2"),
    ({"reward.required_components": ["sweet"], "reward.component_weights": {"sour": 1}}, "'sweet' has no weight"),
    ({"reward.component_weights": {"sweet": 1, "sour": 1, "sower": 1}}, "did you mean 'sour'"),
    ({"reward.component_weights": {"sweet": 0, "sour": 0}}, "all weights are 0"),
    ({"reward.scorer_path": ...}, "give --reward NAME"),
    ({"reward.component_weights": {}}, "--reward-component-weights is {}"),
    ({"reward.model_path": "/nowhere"}, "--reward-model-path is '/nowhere'"),
    ({"rollout.prompt_data": ...}, "give --prompt-data"),
    ({"rollout.rollout_batch_size": ...}, "give --rollout-batch-size"),
    ({"rollout.n_samples_per_prompt": ...}, "give --n-samples-per-prompt"),
    ({"rollout.global_batch_size": 31}, "4 x 8 = 32"),
    ({"rollout.eval_interval": 5}, "give --eval-prompt-data"),
    ({"flow_grpo.num_updates_per_batch": 3}, "does not divide the 32 images"),
    ({"flow_grpo.num_updates_per_batch": 8, "rollout.micro_batch_size": 8}, "cuts a micro-batch of 8"),
    ({"optimizer.lr": ...}, "give --lr"),
    ({"optimizer.lr": 0.0}, "--lr is 0.0"),
    ({"optimizer.lr": -1.0}, "--lr is -1.0"),
    ({"optimizer.min_lr": 1.0}, "--min-lr is 1.0"),
    ({"fsdp.lr_scheduler": "cosine"}, "give --lr-decay-iters"),
    (
        {"fsdp.lr_scheduler": "linear", "optimizer.lr_decay_iters": 5, "optimizer.lr_warmup_iters": 5},
        "more than --lr-warmup-iters 5",
    ),
    ({"flow_grpo.eps_clip": 0.0}, "--eps-clip is 0.0"),
    ({"flow_grpo.eps_clip_high": -1.0}, "--eps-clip-high is -1.0"),
    (
        {"flow_grpo.disable_grpo_std_normalization": True, "flow_grpo.generative_advantage_std_mode": "group"},
        "contradicts --disable-grpo-std-normalization",
    ),
]


def test_a_good_configuration_passes_without_a_word(run):
    assert run() == []
    assert run(LORA | {"lora.adapter_mode": True}) == []


@pytest.mark.parametrize(("changes", "expected"), BROKEN, ids=[text for _, text in BROKEN])
def test_one_broken_rule(run, changes, expected):
    with pytest.raises(PreflightError) as caught:
        run(changes)
    assert len(caught.value.violations) == 1, caught.value.violations
    assert expected in caught.value.violations[0]


def test_several_nodes_need_a_cluster_that_is_there_already(run):
    two = {"backend.resource": {"actor": [2, 3], "rollout": [2, 3]}}
    with pytest.raises(PreflightError, match="set RAY_ADDRESS"):
        run(two)
    run(two, RAY_ADDRESS="head:6379")
    with pytest.raises(PreflightError, match="a node's 3 devices are not divisible by it") as caught:
        run(
            two | {"rollout.rollout_num_gpus_per_engine": 2, "rollout.rollout_engine": "a.b:C"}, RAY_ADDRESS="head:6379"
        )
    assert len(caught.value.violations) == 1


def test_all_violations_come_in_one_error(run):
    changes: dict[str, object] = {"optimizer.lr": ..., "backend.colocate": False, "flow_grpo.eps_clip": 0.0}
    with pytest.raises(PreflightError) as caught:
        run(changes)
    assert len(caught.value.violations) == 3
    assert all(text in str(caught.value) for text in caught.value.violations)
    assert "(call backend.colocate)" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**LORA, "fsdp.master_dtype": None}, "--fsdp-master-dtype fp32"),
        ({"flow_grpo.num_updates_per_batch": 1}, "the ratio is always 1"),
        ({"optimizer.lr_decay_iters": 10}, "no effect"),
        ({"rollout.micro_batch_size": 3}, "does not divide the 8 images"),
        ({"rollout.rollout_engine_dtype": "fp32"}, "differs from --fsdp-param-dtype"),
        ({"backend.resource": {"actor": [1, 3], "rollout": [1, 3]}}, "every rank replays every image"),
        ({"rollout.rollout_engine": EMBEDDED, "rollout.rollout_engine_dtype": "fp32"}, "is 'fp32'"),
        ({"rollout.n_samples_per_prompt": 1}, "a group of one"),
        ({"model.model_revision": "main"}, "--model-revision is 'main'"),
        ({SDE: {"sde_indices": [1], "sde_pool": [2, 3]}}, "sde_pool is (2, 3)"),
    ],
)
def test_warnings(run, changes, expected):
    (text,) = run(changes)
    assert expected in text


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.eval_prompt_data": ("held-out_1.5", "eval.txt")},
        {SDE: {"sde_indices": [1], "sde_type": "cps", "eta": 1.0}},
        {SDE: {"sde_indices": [1], "eta": 1.1}},
        {SDE: {"sde_indices": [1], "driver_sigmas": False}, "rollout.rollout_engine": "a.b:C"},
        {"reward.scorer_path": "a.b:C"},
        {"reward.scorer_path": "a.b:C", "reward.component_weights": {"group": 2}},
        {"fsdp.param_dtype": "fp32", "weight_sync.wire_dtype": "fp32", "rollout.rollout_engine_dtype": "fp32"},
    ],
    ids=str,
)
def test_what_is_allowed(run, changes):
    assert run(changes) == []


def test_a_component_may_have_any_name_whose_metrics_are_its_own():
    """By the table: a component's metrics must not read as other rows of it."""

    def clashes(component: str) -> bool:
        rows = {find_metric(f"reward/{component}_{name}").name for name in ("mean", "std", "min", "max")}
        return rows != {f"reward/<component>_{name}" for name in ("mean", "std", "min", "max")}

    own = [metric.name.removeprefix("reward/") for metric in METRICS if metric.name.startswith("reward/")]
    candidates = {name.removesuffix(end) for name in own for end in ("", "_mean", "_std", "_min", "_max")}
    assert {name for name in candidates if "<" not in name and clashes(name)} == set(RESERVED_COMPONENTS)


def test_a_declared_component_may_not_break_metric_names(good, toy):
    class Odd(type(toy.plugin)):
        @hookimpl
        def relax_register_rewards(self, register):
            register(RewardSpec(name="taste", scorer="a:B", components=("advantage", "how sweet")))

    toy.plugin = Odd()
    registry = Registry([PluginEntry("toy", "toy_preflight_plugin:plugin", "toy-dist", "1.0")])
    with pytest.raises(PreflightError) as caught:
        check(resolve(good, registry=registry, environ={}), registry, environ={})
    assert ["'advantage'" in text or "'how sweet'" in text for text in caught.value.violations] == [True, True]


def test_lora_values_that_nobody_chose_do_not_disturb_full_training(run, make, registry):
    config = make({"lora.alpha": 8.0})
    for source in ("preset toy:lora", "recipe r.json:3 (preset toy:lora)"):
        sources = config.provenance | {"lora.alpha": source}
        assert check(config.model_copy(update={"provenance": sources}), registry, environ={}) == []


def test_a_recipe_of_a_run_that_passed_passes(make, registry, tmp_path):
    """Also where a preset sets an interval for evaluation prompts that the run did not have."""
    config = make({"rollout.eval_interval": 5})
    sources = config.provenance | {"rollout.eval_interval": "preset toy:lora"}
    config = config.model_copy(update={"provenance": sources})
    assert check(config, registry, environ={}) == []
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(config.to_recipe()))
    assert check(resolve(registry=registry, config_file=file, environ={}), registry, environ={}) == []


def test_dance_may_train_step_0(run):
    assert run({SDE: {"sde_indices": [0, 3], "sde_type": "dance"}}) == []


@pytest.mark.parametrize("steps", range(3, 40))
def test_the_suggested_window_is_a_cure(steps):
    bad = SamplingConfig(num_inference_steps=steps, num_sde_steps=3)
    text = _cure(bad, 0)
    low, high = (float(part) for part in text[text.index("[") + 1 : -1].split(","))
    trained = SamplingConfig(
        num_inference_steps=steps, num_sde_steps=3, sde_timestep_fraction=(low, high)
    ).trainable_steps()
    assert trained
    assert 0 not in trained
    assert steps - 1 not in trained


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments(run, name):
    with pytest.raises(PreflightError, match="expandable_segments"):
        run(**{name: "max_split_size_mb:128, expandable_segments:True"})
    assert run(**{name: "expandable_segments:False"}) == []


def test_a_run_folder_is_not_used_twice(run, good):
    folder = good["run.run_dir"]
    folder.mkdir()
    assert run() == []
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(PreflightError) as caught:
        run()
    assert caught.value.violations[0].startswith(f"--run-dir is {str(folder)!r} (call run.run_dir): ")
    assert "not empty" in caught.value.violations[0]


def test_a_run_folder_that_cannot_be_used(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("run.run_dir", "artifact.root"):
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(PreflightError, match=f"{str(tmp_path / 'file')!r} is a file"):
                run({path: folder})
    # Permissions are simulated: they do not bind root, as which tests may run.
    closed = tmp_path / "closed"
    closed.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: path != closed)
        for path in ("run.run_dir", "artifact.root"):
            for folder in (closed, closed / "new" / "deeper"):
                with pytest.raises(PreflightError) as caught:
                    run({path: folder})
                (text,) = caught.value.violations
                assert f"no permission to write in {str(closed)!r}" in text

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    with pytest.raises(PreflightError, match=r"--run-dir is .* cannot be read \(Permission denied\)"):
        run({"run.run_dir": closed})


def test_the_folder_of_the_model(run, good, toy, tmp_path):
    (tmp_path / "model" / "transformer").rmdir()
    with pytest.raises(PreflightError, match="no folder transformer/"):
        run()
    toy.ToyAdapter.check_model_path = lambda self, path: [f"vae/ is missing in {path}"]
    with pytest.raises(PreflightError) as caught:
        run()
    assert caught.value.violations[0].endswith(f"vae/ is missing in {tmp_path / 'model'}")
    good["model.model_path"] = str(tmp_path / "prompts")
    (tmp_path / "prompts").write_text("")
    with pytest.raises(PreflightError, match="a file, not a folder"):
        run()


def test_an_adapter_that_cannot_serve_the_embedded_engine(run, toy):
    toy.ToyAdapter.load_embedded_model = None
    with pytest.raises(PreflightError, match="it lacks load_embedded_model"):
        run()


def test_an_adapter_that_misbehaves_is_a_plugin_error(run, toy):
    toy.ToyAdapter.validate_sampling = lambda self, sampling: 1 / 0
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        run()
    toy.ToyAdapter.validate_sampling = lambda self, sampling: "text"
    with pytest.raises(PluginError, match="returned 'text'"):
        run()

    def refuse(self):
        raise OSError("no licence")

    toy.ToyAdapter.__init__ = refuse
    with pytest.raises(PluginError, match="cannot be constructed: OSError: no licence"):
        run()


def test_names_that_nothing_registers(run):
    with pytest.raises(UnknownNameError, match="locall"):
        run({"rollout.rollout_engine": "locall"})
    with pytest.raises(UnknownNameError, match="tastee"):
        run({"reward.scorer_path": "tastee"})


def test_the_split_is_the_trainers(run):
    """Preflight accepts exactly the geometries that the trainer's own plan accepts."""
    plan = pytest.importorskip("relax_sdk.training.plan")
    from relax_sdk.errors import TrainingError

    def passes(error: type[Exception], call: Callable[[], object]) -> bool:
        try:
            call()
        except error:
            return False
        return True

    for groups, candidates, world, micro, updates in product((1, 4), (6, 8), (1, 2, 3), (1, 4), (1, 2, 3, 4)):
        changes = {
            "rollout.rollout_batch_size": groups,
            "rollout.n_samples_per_prompt": candidates,
            "rollout.micro_batch_size": micro,
            "flow_grpo.num_updates_per_batch": updates,
            "backend.resource": {"actor": [1, world], "rollout": [1, world]},
        }
        shape = {"groups": groups, "candidates": candidates, "rank": 0, "world": world, "micro_batch_size": micro}
        shape |= {"steps": 3, "steps_per_forward": 2}
        planned = passes(TrainingError, functools.partial(plan.plan_updates, num_updates=updates, **shape))
        assert passes(PreflightError, functools.partial(run, changes)) == planned, changes
