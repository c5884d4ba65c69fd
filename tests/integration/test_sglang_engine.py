"""The real, stock SGLang server on a CPU under our engine: identity, parity, weight sync, hand-over, failures.

One server for each sync mode, started once. In float32, so that what is compared is compared to rounding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_runs import ADAPTER, ALPHA, MODEL, PROMPTS, Link, change, policy, requests, settings, sync

from relax_sdk.errors import RolloutError, WeightSyncError
from relax_sdk.flow import replay_log_prob
from relax_sdk.protocols import FullWeightManifest, ReplayBatch, RolloutResponse, SyncOffer, WeightBucket
from relax_sdk.rollout.local import LocalEngine
from relax_sdk.rollout.sglang.engine import SGLangNativeGenerationEngine
from relax_sdk.weights import SendBuffer, bytes_checksum

# An installation without SGLang is a supported one; `make test` always has it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SGLangNativeGenerationEngine]]:
    """Two servers, started side by side; each test leaves them at version 0 or syncs them itself."""
    made = {
        mode: SGLangNativeGenerationEngine(
            adapter=ADAPTER, settings=settings(mode, tmp_path_factory.mktemp(f"engine_{mode}"))
        )
        for mode in ("full", "adapter")
    }
    failures: list[BaseException] = []

    def start(engine: SGLangNativeGenerationEngine) -> None:
        try:
            engine.start()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=start, args=(engine,)) for engine in made.values()]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        yield made
    finally:
        for engine in made.values():
            engine.shutdown()


@pytest.fixture(scope="module")
def embedded() -> dict[str, LocalEngine]:
    made = {mode: LocalEngine(adapter=ADAPTER, settings=settings(mode, Path())) for mode in ("full", "adapter")}
    for engine in made.values():
        engine.start()
    return made


def one(engine: Any, samples: int = 2, **changes: Any) -> RolloutResponse:
    (response,) = engine.generate(requests(samples, **changes))
    return response


def assert_alike(first: RolloutResponse, second: RolloutResponse) -> None:
    """The same trajectories to float32 rounding."""
    torch.testing.assert_close(first.trajectory_latents, second.trajectory_latents, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(first.rollout_log_probs, second.rollout_log_probs, atol=2e-6, rtol=0)
    torch.testing.assert_close(first.sigmas, second.sigmas, atol=1e-7, rtol=0)
    gap = (first.media["image"].int() - second.media["image"].int()).abs()
    assert gap.max() <= 1


# --- sampling, at the weights of the model folder --------------------------------------------------------------------


def test_a_candidate_is_the_same_in_any_company_and_on_any_engine(engines: dict[str, Any]) -> None:
    whole = one(engines["full"], 5)
    for engine, samples in (("full", 1), ("adapter", 3), ("adapter", 5)):
        part = one(engines[engine], samples)
        assert torch.equal(part.trajectory_latents, whole.trajectory_latents[:samples])
        assert torch.equal(part.rollout_log_probs, whole.rollout_log_probs[:samples])
        assert torch.equal(part.media["image"], whole.media["image"][:samples])
    beside = engines["full"].generate(requests(2, prompts=PROMPTS))
    assert torch.equal(beside[0].trajectory_latents, whole.trajectory_latents[:2])


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps"])
def test_the_embedded_engine_makes_the_same_trajectory(
    sde_type: str, engines: dict[str, Any], embedded: dict[str, LocalEngine]
) -> None:
    groups = requests(2, sde_type=sde_type, prompts=PROMPTS)
    for request, ours, theirs in zip(
        groups, embedded["full"].generate(groups), engines["full"].generate(groups), strict=True
    ):
        ADAPTER.validate_rollout_response(request, theirs)
        assert_alike(ours, theirs)
        assert theirs.sde_indices == (1, 3, 5)


def test_an_evaluation_has_no_random_step(engines: dict[str, Any], embedded: dict[str, LocalEngine]) -> None:
    response = one(engines["full"], 1, steps=(), rollout_id=None)
    assert not response.rollout_log_probs.any()
    assert_alike(response, one(embedded["full"], 1, steps=(), rollout_id=None))


@pytest.mark.parametrize("sde_type", ["sde", "dance"])
def test_the_trainers_replay_gives_the_engines_log_probabilities(sde_type: str, engines: dict[str, Any]) -> None:
    (request,) = requests(3, sde_type=sde_type)
    (response,) = engines["full"].generate([request])
    module = policy("full")
    sigmas = response.sigmas
    gaps = []
    for step in response.sde_indices:
        x, after = response.trajectory_latents[:, step], response.trajectory_latents[:, step + 1]
        here, then = sigmas[step].expand(3), sigmas[step + 1].expand(3)
        batch = ReplayBatch(latents=x, sigmas=here, conditions=(dict(response.conditions),) * 3, height=64, width=64)
        with torch.no_grad():
            velocity = ADAPTER.replay_transition(module, batch)
        replayed = replay_log_prob(
            x, after, velocity, here, then, eta=0.7, sde_type=sde_type, sigma_clamp=float(sigmas[1])
        )
        gaps.append((replayed - response.rollout_log_probs[:, step]).abs())
    assert torch.stack(gaps).mean() <= 5e-5
    assert torch.stack(gaps).max() <= 5e-6  # what float32 really gives


def test_a_long_prompt_is_cut_where_the_embedded_engine_cuts_it(
    engines: dict[str, Any], embedded: dict[str, LocalEngine]
) -> None:
    long = ("a small red circle beside a large blue square " * 80,)
    theirs, ours = (one(engine["full"], 1, prompts=long) for engine in (engines, embedded))
    assert theirs.truncated_prompts == ours.truncated_prompts == 1
    assert theirs.conditions["encoder_hidden_states"].shape == ours.conditions["encoder_hidden_states"].shape
    assert_alike(theirs, ours)


# --- weight sync -----------------------------------------------------------------------------------------------------


def sha256(tensor: torch.Tensor) -> str:
    """Of a tensor's dtype, shape and bytes, as SGLang's checker takes it."""
    digest = hashlib.sha256()
    digest.update(str(tensor.dtype).encode())
    digest.update(str(tuple(tensor.shape)).encode())
    digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def confirmed_by_sglang(engine: Any, module: torch.nn.Module) -> tuple[bool, str]:
    """What SGLang's own checker says about its weights against ours, by name; it knows nothing of our sync.

    It cannot look into the text stream's three projections, which SGLang keeps as one parameter.
    """
    expected = {name: sha256(tensor) for name, tensor in module.named_parameters() if ".attn.add_" not in name}
    body = json.dumps({"target_module": "transformer", "expected_named_tensors_sha256": expected}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine._client._port}/update_weights_from_tensor_checker",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        answer = json.loads(error.read())
    return bool(answer["success"]), str(answer["message"])


def test_full_syncs_arrive_and_change_the_output(engines: dict[str, Any], embedded: dict[str, LocalEngine]) -> None:
    engine, ours, module = engines["full"], embedded["full"], policy("full")
    before = one(engine)
    assert confirmed_by_sglang(engine, module)[0]
    for version in (1, 2):
        change(module, version)
        assert not confirmed_by_sglang(engine, module)[0]
        report = sync(engine, module, version, mode="full")
        sync(ours, module, version, mode="full")
        assert report.manifest.tensors == len(list(module.parameters()))
        assert confirmed_by_sglang(engine, module)[0]
        after = one(engine, version=version)
        assert_alike(after, one(ours, version=version))
        assert (after.trajectory_latents - before.trajectory_latents).abs().max() > 0.01
    with pytest.raises(RolloutError, match="policy version mismatch: the engine holds 2"):
        one(engine, version=1)


def test_the_hand_over_under_full_sync(engines: dict[str, Any], embedded: dict[str, LocalEngine]) -> None:
    engine, ours, module = engines["full"], embedded["full"], policy("full")
    version = engine.policy_version + 1
    engine.release()
    assert engine.state()["released"] == ["text_encoder", "transformer", "vae"]
    with pytest.raises(RolloutError, match="its weights were released"):
        one(engine, version=engine.policy_version)
    engine.resume(weights_only=True)
    assert engine.state()["released"] == ["text_encoder", "vae"]
    sync(engine, module, version, mode="full")
    sync(ours, module, version, mode="full")
    engine.resume()
    assert_alike(one(engine, version=version), one(ours, version=version))


def test_what_is_announced_wrongly_changes_nothing(engines: dict[str, Any]) -> None:
    engine = engines["full"]
    version, before = engine.policy_version, one(engine, version=engine.policy_version)
    for broken, said in (
        (torch.nn.Sequential(torch.nn.Linear(3, 3)), "unknown name '0.weight'"),
        (_without(policy("full"), "proj_out"), "parameters of the engine are not, or not exactly once, in the sync"),
        (_reshaped(policy("full")), "'img_in.weight' has shape"),
        (_half_a_fused_layer(policy("full")), "not exactly once, in the sync"),
    ):
        with pytest.raises(WeightSyncError, match=said):
            sync(engine, broken, version + 1, mode="full")
        assert engine.policy_version == version
    assert torch.equal(one(engine, version=version).trajectory_latents, before.trajectory_latents)


def test_corrupt_bytes_leave_an_engine_that_refuses_until_it_is_synced(engines: dict[str, Any]) -> None:
    engine, module = engines["full"], policy("full")
    version = engine.policy_version
    names = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    size = sum(parameter.numel() * 4 for parameter in module.parameters())
    manifest = FullWeightManifest.describe(
        "full", ((name, tuple(item.shape), item.numel() * 4) for name, item in module.named_parameters())
    )
    with SendBuffer.open(torch.device("cpu"), size) as buffer:
        engine.begin_sync(SyncOffer(manifest=manifest, dtype="float32", tensors=names, buffers=(buffer.handle,)))
        data = torch.cat([item.detach().reshape(-1) for item in module.parameters()]).view(torch.uint8)
        checksum = bytes_checksum(data)
        data[12345] ^= 1
        buffer.slot(0)[:size].copy_(data)
        with pytest.raises(WeightSyncError, match="arrived with checksum"):
            engine.receive(WeightBucket(index=0, slot=0, first=0, count=len(names), bytes=size, checksum=checksum))
        engine.abort_sync()
    assert engine.policy_version == version
    with pytest.raises(RolloutError, match="an unfinished sync"):
        one(engine, version=version)
    sync(engine, module, version + 1, mode="full")
    one(engine, version=version + 1)


def _without(module: torch.nn.Module, name: str) -> torch.nn.Module:
    delattr(module, name)
    return module


def _reshaped(module: torch.nn.Module) -> torch.nn.Module:
    module.img_in = torch.nn.Linear(module.img_in.in_features + 1, module.img_in.out_features)
    return module


def _half_a_fused_layer(module: torch.nn.Module) -> torch.nn.Module:
    """SGLang keeps the text stream's three projections as rows of one parameter."""
    del module.transformer_blocks[1].attn.add_k_proj
    return module


def test_adapter_syncs_arrive_and_leave_the_base_alone(
    engines: dict[str, Any], embedded: dict[str, LocalEngine]
) -> None:
    engine, ours, module = engines["adapter"], embedded["adapter"], policy("adapter")
    before = one(engine)
    for version in (1, 2):
        change(module, version, width=0.02)
        report = sync(engine, module, version, mode="adapter")
        sync(ours, module, version, mode="adapter")
        assert report.manifest.tensors == 2 * 8 * 4
        after = one(engine, version=version)
        assert_alike(after, one(ours, version=version))
        assert (after.trajectory_latents - before.trajectory_latents).abs().max() > 0.01
    calls = engine.state()["lora_calls"]
    # Of a block's eight adapted layers SGLang keeps three as one.
    assert len(calls) == 6 * 4
    assert min(calls.values()) > 0
    engine.release()
    engine.resume(weights_only=True)
    sync(engine, module, 3, mode="adapter")
    sync(ours, module, 3, mode="adapter")
    engine.resume()
    assert_alike(one(engine, version=3), one(ours, version=3))
    with pytest.raises(WeightSyncError, match="a sync in mode 'full' came"):
        sync(engine, policy("full"), 4, mode="full")
    one(engine, version=3)


def test_the_adapters_output_is_that_of_a_diffusers_pipeline(engines: dict[str, Any]) -> None:
    from diffusers import QwenImagePipeline

    engine, module = engines["adapter"], policy("adapter")
    change(module, 7, width=0.02)
    version = engine.policy_version + 1
    sync(engine, module, version, mode="adapter")
    (request,) = requests(1, version=version, steps=(), rollout_id=None)
    (response,) = engine.generate([request])

    pipeline = QwenImagePipeline.from_pretrained(MODEL, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    adapter = {
        "transformer." + name.replace(".default.", "."): tensor.detach()
        for name, tensor in module.named_parameters()
        if "lora_" in name
    }
    alphas = {name.replace("lora_A.weight", "alpha"): ALPHA for name in adapter if "lora_A" in name}
    pipeline.transformer.load_lora_adapter(adapter, network_alphas=alphas, prefix="transformer")
    latents = pipeline(
        prompt=request.plan.prompt,
        true_cfg_scale=1.0,
        height=64,
        width=64,
        num_inference_steps=12,
        latents=response.trajectory_latents[:, 0].clone(),
        output_type="latent",
    ).images
    torch.testing.assert_close(response.trajectory_latents[:, -1], latents, atol=5e-5, rtol=1e-4)


# --- the end of a server; last, because it ends them -----------------------------------------------------------------


def test_a_hung_server_is_named(engines: dict[str, Any]) -> None:
    engine = engines["full"]
    engine._client._timeout_s = 2.0
    os.killpg(engine._server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RolloutError, match="did not answer within 2 s"):
            one(engine, version=engine.policy_version)
        assert "did not answer within 2 s" in engine.problem()
    finally:
        os.killpg(engine._server.pid, signal.SIGCONT)


@pytest.mark.parametrize("moment", ["generate", "sync", "release"])
def test_a_killed_server_is_named_and_can_be_started_again(moment: str, engines: dict[str, Any]) -> None:
    engine, module = engines["adapter"], policy("adapter")
    if engine.problem() is not None:
        engine.shutdown()
        engine.start()
    version, pid = engine.policy_version, engine._server.pid
    assert engine.problem() is None
    if moment == "generate":
        threading.Timer(0.5, os.killpg, (pid, signal.SIGKILL)).start()
        with pytest.raises(RolloutError, match=r"ended with signal 9 \(SIGKILL\); its last lines"):
            one(engine, 64, version=version)
    elif moment == "sync":
        link = Link(engine)
        original = link.submit

        def submit(method: str, *args: Any) -> Any:
            if method == "receive":
                os.killpg(pid, signal.SIGKILL)
            return original(method, *args)

        link.submit = submit  # type: ignore[method-assign]
        engine_link = pytest.MonkeyPatch()
        engine_link.setattr("sglang_runs.Link", lambda _engine: link)
        try:
            with pytest.raises(WeightSyncError, match=r"signal 9 \(SIGKILL\)"):
                sync(engine, module, version + 1, mode="adapter")
        finally:
            engine_link.undo()
    else:
        os.killpg(pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match=r"signal 9 \(SIGKILL\)"):
            engine.release()
    assert engine.policy_version == version
    assert "SIGKILL" in engine.problem()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(pid)


def test_a_server_that_is_started_again_holds_the_folders_weights(engines: dict[str, Any]) -> None:
    engine = engines["adapter"]
    engine.shutdown()
    engine.start()
    assert (engine.policy_version, engine.problem()) == (0, None)
    assert one(engine).trajectory_latents.isfinite().all()


def _alive(group: int) -> bool:
    """Whether a process of the group runs; one that is dead and not yet reaped does not."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[2] == str(group) and fields[0] != "Z":
                return True
    return False
