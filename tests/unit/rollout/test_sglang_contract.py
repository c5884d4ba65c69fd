"""The contract with SGLang's source: against a small tree that keeps it, and against the installed SGLang if any."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import sglang_tree as tree

from relax_sdk.errors import PreflightError
from relax_sdk.rollout.sglang.contract import (
    CONTRACT,
    INSTALL_COMMAND,
    SUPPORTED_VERSION,
    contract_problems,
    require_contract,
)
from relax_sdk.rollout.sglang.expectations import file_problems


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A ``sglang`` package that keeps the contract, and that must not be imported."""
    folder = tmp_path / "sglang"
    for name, text in tree.TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "__init__.py").write_text("raise AssertionError('sglang was imported')\n", encoding="utf-8")
    return folder


def change(package: Path, name: str, old: str, new: str) -> None:
    text = (package / name).read_text(encoding="utf-8")
    assert old in text
    (package / name).write_text(text.replace(old, new), encoding="utf-8")


def without_lines(texts: Iterable[str]) -> list[str]:
    return [re.sub(r"\.py:\d+:", ".py:", text) for text in texts]


def pretend_installed(package: Path, monkeypatch: pytest.MonkeyPatch, *, version: str | None) -> None:
    if version is not None:
        information = package.parent / f"sglang-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n")
    # Another test may have imported the real one, whose place would then be the answer.
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(package.parent)


def test_a_tree_that_keeps_the_contract_has_no_problem(package: Path) -> None:
    assert contract_problems(package) == []
    assert set(tree.TREE) == set(CONTRACT)


@pytest.mark.parametrize("name", CONTRACT)
def test_every_expectation_fails_on_an_empty_file(package: Path, name: str) -> None:
    (package / name).write_text("", encoding="utf-8")
    for expectation in CONTRACT[name]:
        problems = list(file_problems(package, name, [expectation]))
        assert problems, expectation
        assert all(text.startswith(f"sglang/{name}: expected ") and text.endswith("found none") for text in problems)
    (package / name).unlink()
    assert contract_problems(package) == [f"sglang/{name}: expected a readable file, found No such file or directory"]


BREAKS = {
    "group renamed": (
        *(tree.PLUGINS, '"sglang.multimodal_gen.plugins"', '"sglang.plugins"'),
        "GENERAL_PLUGINS_GROUP = 'sglang.multimodal_gen.plugins', found 'sglang.plugins'",
    ),
    "hook type gone": (tree.REGISTRY, "AROUND = 3", "WRAP = 3", "HookType.AROUND, found none"),
    "hook type elsewhere": (
        *(tree.PLUGINS, "hook_registry import HookType", "types import HookType"),
        "HookType imported from sglang.srt.plugins.hook_registry, found from sglang.srt.plugins.types",
    ),
    "registry not subclassed": (
        *(tree.PLUGINS, "HookRegistry(_HookRegistry)", "HookRegistry(Base)"),
        "class HookRegistry(_HookRegistry), found class HookRegistry(Base)",
    ),
    "patched set gone": (tree.PLUGINS, "_patched = set()", "_done = set()", "HookRegistry._patched, found none"),
    "patched set not filled": (
        *(tree.REGISTRY, "cls._patched.add(target)", "cls._patched.update(targets)"),
        "a call of cls._patched.add(target) in HookRegistry.apply_hooks, "
        "found none; the nearest is cls._patched.update(targets)",
    ),
    "route renamed": (
        *(tree.WEIGHTS, '"/resume_memory_occupation"', '"/resume_memory"'),
        "route POST /resume_memory_occupation, found none; the nearest is POST /release_memory_occupation",
    ),
    "route by another method": (
        *(tree.HTTP, 'health_router.get("/health")', 'health_router.post("/health")'),
        "route GET /health, found none; the nearest is POST /health",
    ),
    "prefix renamed": (
        *(tree.ROLLOUT, 'prefix="/rollout"', 'prefix="/rl"'),
        "route POST /rollout/generate, found none; the nearest is POST /rl/generate",
    ),
    "router mounted elsewhere": (
        *(tree.HTTP, "include_router(rollout_api.router)", "include_router(rollout_api.router, prefix='/v2')"),
        "a call of app.include_router(rollout_api.router) in create_app, "
        "found none; the nearest is app.include_router(rollout_api.router, prefix='/v2')",
    ),
    "request field renamed": (
        *(tree.RECORDS, "rollout_sde_step_indices", "rollout_step_indices"),
        "RolloutRequest.rollout_sde_step_indices, found none; the nearest is rollout_step_indices",
    ),
    "response field gone": (
        *(tree.RECORDS, "    dit_trajectory: object = None\n", ""),
        "RolloutResponse.dit_trajectory, found none",
    ),
    "sampling field gone": (tree.SAMPLING, "quality", "grade", "SamplingParams.quality, found none"),
    "text window changed": (tree.ENCODER, "512", "1024", "QwenImageArchConfig.text_len = 512, found 1024"),
    "text window computed": (tree.ENCODER, " = 512", "", "QwenImageArchConfig.text_len = 512, found no value"),
    "dropped tokens changed": (
        *(tree.TEXT, "drop_idx=34", "drop_idx=64"),
        "drop_idx=34 in def qwen_image_postprocess_text, found 64",
    ),
    "dropped tokens without default": (
        *(tree.TEXT, "drop_idx=34", "drop_idx"),
        "drop_idx=34 in def qwen_image_postprocess_text, found no default",
    ),
    "parameter renamed": (
        *(tree.LATENT, "def forward(self, batch: Req, server_args)", "def forward(self, req, server_args)"),
        "def LatentPreparationStage.forward(self, batch, server_args), "
        "found def LatentPreparationStage.forward(self, req, server_args)",
    ),
    "parameters in another order": (
        *(tree.CONTROLLER, "log_prob_sum, log_prob_count): ...", "log_prob_count, log_prob_sum): ..."),
        "def FlowRolloutController.append_local_rollout_log_probs(self, log_prob_sum, log_prob_count), "
        "found def FlowRolloutController.append_local_rollout_log_probs(self, log_prob_count, log_prob_sum)",
    ),
    "parameter added": (
        *(tree.MIXIN, "(self, req)", "(self, req, *, flush=True, **rest)"),
        "def GPUWorkerPostTrainingMixin.update_weights_from_tensor(self, req), "
        "found def GPUWorkerPostTrainingMixin.update_weights_from_tensor(self, req, *, flush, **rest)",
    ),
    "keyword became positional": (
        *(tree.DIT, "*, weights_path", "weights_path, /"),
        "def BaseDiT.refresh_weight_derived_caches(self, *, weights_path), "
        "found def BaseDiT.refresh_weight_derived_caches(self, weights_path, /)",
    ),
    "became async": (
        *(tree.WORKER, "def release_memory_occupation", "async def release_memory_occupation"),
        "def GPUWorker.release_memory_occupation(self), found async def GPUWorker.release_memory_occupation(self)",
    ),
    "method gone": (
        *(tree.WORKER, "_drop_breakable_cuda_graphs", "_drop_cuda_graphs"),
        "def GPUWorker._drop_breakable_cuda_graphs, found none; the nearest is _drop_cuda_graphs",
    ),
    "class renamed, many expectations": (
        *(tree.CONTROLLER, "class FlowRolloutController", "class FlowController"),
        "class FlowRolloutController, found none; the nearest is FlowController",
    ),
    "attribute renamed": (
        *(tree.CONTROLLER, "self.noise_buffer: object", "self.noise: object"),
        "self.noise_buffer set in FlowRolloutController.__init__, found none; the nearest is noise_level",
    ),
    "attribute only read": (
        *(tree.CONTROLLER, "self.debug_mode, self.log_prob_no_const = False, False", "print(self.debug_mode)"),
        "self.debug_mode set in FlowRolloutController.__init__, found none",
        "self.log_prob_no_const set in FlowRolloutController.__init__, found none",
    ),
    "noise drawn elsewhere": (
        *(tree.CONTROLLER, "return self._rollout_variance_noise(batch, model_output)", "return draw(batch)"),
        "a call of self._rollout_variance_noise in FlowRolloutController.flow_sde_sampling, found none",
    ),
    "pipeline builds its own stage": (
        *(tree.COMPOSED, "self.add_stage(LatentPreparationStage(1))", "self.add_stage(FastLatentPreparationStage(1))"),
        "a call of LatentPreparationStage in ComposedPipelineBase.add_standard_latent_preparation_stage, "
        "found none; the nearest is FastLatentPreparationStage",
    ),
    "Qwen-Image overrides the builder": (
        *(tree.QWEN, "    def create_", "    def add_standard_timestep_preparation_stage(self): ...\n    def create_"),
        "QwenImagePipeline.add_standard_timestep_preparation_stage inherited, found a definition of its own",
    ),
    "Qwen-Image with another base": (
        *(tree.QWEN, "(LoRAPipeline, ", "(FastStages, LoRAPipeline, "),
        "class QwenImagePipeline(LoRAPipeline, ComposedPipelineBase), "
        "found class QwenImagePipeline(FastStages, LoRAPipeline, ComposedPipelineBase)",
    ),
    "Qwen-Image builds stages by hand": (
        *(tree.QWEN, "self.add_standard_t2i_stages", "self.add_fast_t2i_stages"),
        "a call of self.add_standard_t2i_stages in QwenImagePipeline.create_pipeline_stages, "
        "found none; the nearest is self.add_fast_t2i_stages",
    ),
    "CPU worker overrides a hooked method": (
        *(tree.CPU_WORKER, "__init__(self)", "execute_forward(self, batch)"),
        "CPUWorker.execute_forward inherited, found a definition of its own",
    ),
    "worker overrides the mixin": (
        *(tree.WORKER, "    def init_", "    def update_weights_from_tensor(self, req): ...\n    def init_"),
        "GPUWorker.update_weights_from_tensor inherited, found a definition of its own",
    ),
    "flag renamed": (
        *(tree.ARGUMENTS, "--tp-size", "--tensor-parallel-size"),
        "--tp-size in ServerArgs.add_cli_args, found none",
    ),
    "flag behind a prefix": (
        *(tree.FLAGS, '"--{prefix}dit-precision"', '"--pipeline-{prefix}dit-precision"'),
        "--dit-precision in PipelineConfig.add_cli_args, found none; the nearest is --vae-precision",
    ),
    "flag of the launcher gone": (
        *(tree.SERVE, '"--model-type"', '"--modality"'),
        "--model-type in _extract_model_type_override, found none; the nearest is --modality",
    ),
    "requests are batched": (tree.ARGUMENTS, "= 1", "= 8", "ServerArgs.batching_max_size = 1, found 8"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_break_gives_exactly_its_text(package: Path, case: str) -> None:
    name, old, new, *expected = BREAKS[case]
    change(package, name, old, new)
    texts = without_lines(contract_problems(package))
    assert texts == [f"sglang/{name}: expected {text}" for text in expected]


def test_a_problem_names_the_line(package: Path) -> None:
    change(package, tree.TIMESTEP, "class ", "\n\nclass ")
    change(package, tree.TIMESTEP, "batch", "request")
    assert contract_problems(package)[0].startswith(
        f"sglang/{tree.TIMESTEP}:4: expected def TimestepPreparationStage.forward("
    )


def test_several_breaks_come_together(package: Path) -> None:
    change(package, tree.ENCODER, "512", "256")
    (package / tree.CACHE).unlink()
    (package / tree.LOADER).write_text("def broken(:\n", encoding="utf-8")
    change(package, tree.RECORDS, "suppress_logs", "quiet")
    starts = [text.split(" expected ")[0] for text in contract_problems(package)]
    assert starts == [
        f"sglang/{tree.RECORDS}:1:",
        f"sglang/{tree.ENCODER}:2:",
        f"sglang/{tree.CACHE}:",
        f"sglang/{tree.LOADER}:1:",
    ]


TOO_DEEP = (b"x = " + b"-" * 100_000 + b"1", b"x = " + b"1+" * 100_000 + b"1", b"(" * 5_000)


@pytest.mark.parametrize("content", [b"class Q(:\n", b"x = 1\0", b"x = '\xff'\n", b"\xff\xfe", *TOO_DEEP], ids=range(7))
def test_a_broken_file_is_a_problem_not_a_crash(package: Path, content: bytes) -> None:
    (package / tree.ENCODER).write_bytes(content)
    (text,) = without_lines(contract_problems(package))
    assert text.startswith(f"sglang/{tree.ENCODER}: expected Python source, found ")


def test_a_folder_in_a_files_place_is_a_problem(package: Path) -> None:
    (package / tree.ENCODER).unlink()
    (package / tree.ENCODER).mkdir()
    assert len(contract_problems(package)) == 1


HARMLESS = {
    "invalid escape": (tree.ENCODER, "class", "PATTERN = '\\d'\nclass"),
    "defined on a condition": (tree.CACHE, "def ", "if True:\n  def "),
    "defined in a handler": (tree.CACHE, "def ", "try:\n  import x\nexcept ImportError:\n  def "),
    "relative import": (tree.STAGES, f"{tree.RUNTIME}.pipelines_core.stages.latent_preparation", ".latent_preparation"),
    "relative import of a parent": (tree.HTTP, f"from {tree.RUNTIME}.entrypoints.post_training", "from .post_training"),
    "relative import from two levels up": (tree.UPDATER, f"{tree.RUNTIME}.cache.conditioning", "..cache.conditioning"),
    "another router's name": (tree.WEIGHTS, "router", "weights_router"),
    "a field more": (tree.BATCH, "    extra", "    other: int = 1\n    extra"),
    "plain assignment": (tree.ENCODER, "text_len: int = 512", "text_len = 512"),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_a_harmless_change_passes(package: Path, case: str) -> None:
    change(package, *HARMLESS[case])
    assert contract_problems(package) == []


def test_the_installed_package_is_found_and_not_imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(package, monkeypatch, version=SUPPORTED_VERSION)
    assert contract_problems() == []
    require_contract()
    assert "sglang" not in sys.modules
    change(package, tree.ENCODER, "512", "256")
    assert len(contract_problems()) == 1


def test_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert contract_problems() == [f"sglang: expected an installed package, found none; next: {INSTALL_COMMAND}"]
    with pytest.raises(PreflightError) as caught:
        require_contract()
    assert INSTALL_COMMAND in str(caught.value)
    assert sys.executable in str(caught.value)
    # A folder of that name without a package in it is none either.
    (tmp_path / "sglang").mkdir()
    importlib.invalidate_caches()
    assert len(contract_problems()) == 1


def test_a_package_without_the_diffusion_runtime(tmp_path: Path) -> None:
    expected = f"sglang/multimodal_gen: expected SGLang's diffusion runtime, found none; next: {INSTALL_COMMAND}"
    assert contract_problems(tmp_path) == [expected]


def test_the_error_has_all_problems_and_both_versions(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(package, monkeypatch, version="0.5.99")
    change(package, tree.ENCODER, "512", "256")
    change(package, tree.MAIN, "main()", "main(argv)")
    with pytest.raises(PreflightError) as caught:
        require_contract()
    assert caught.value.violations == tuple(contract_problems())
    assert len(caught.value.violations) == 2
    text = str(pickle.loads(pickle.dumps(caught.value)))
    for part in (*caught.value.violations, f"sglang 0.5.99 in {package}", f"tested with {SUPPORTED_VERSION}"):
        assert part in text
    assert text.endswith(f"next:     {INSTALL_COMMAND}")


def test_a_damaged_copy_of_the_right_version_is_installed_anew(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(package, monkeypatch, version=SUPPORTED_VERSION)
    (package / tree.MAIN).unlink()
    with pytest.raises(PreflightError, match=f"--force-reinstall --no-deps sglang=={SUPPORTED_VERSION}"):
        require_contract()


@pytest.mark.parametrize("version", ["0.5.24", None])
def test_another_version_that_fits_is_only_mentioned(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str | None
) -> None:
    pretend_installed(package, monkeypatch, version=version)
    require_contract(package)
    assert f"sglang {version or 'of unknown version'} fits" in caplog.text
    assert f"tested with {SUPPORTED_VERSION}" in caplog.text


def test_the_real_package_keeps_the_contract() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    assert contract_problems() == []
