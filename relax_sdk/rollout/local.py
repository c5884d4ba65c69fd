"""The embedded engine ``local``: the model family's own pipeline, sampled in this process.

It shares `relax_sdk.flow` and the adapter's forward with the trainer, runs on a CPU or a GPU, and is the reference
that other engines are compared with. One forward serves the candidates of one group, never of two, so a group's
result does not depend on what else is in the request. It leaves out: batching across groups and any fast kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import RolloutError, WeightSyncError
from relax_sdk.flow import ode_step, sde_step, seeded_noise
from relax_sdk.protocols import (
    FullWeightManifest,
    ReplayBatch,
    RolloutRequest,
    RolloutResponse,
    WeightBucket,
)
from relax_sdk.weights import inject_lora, is_lora_name, tensor_checksum, to_peft_name

__all__ = ["LocalEngine"]


class LocalEngine:
    """A `RolloutEngine` around an `EmbeddedModelAdapter`.

    Args:
        adapter: the model family; needs `load_embedded_model` and `pack_initial_noise`.
        model_path: the pipeline's folder.
        revision: passed to the adapter.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: compute dtype of the pipeline.
    """

    def __init__(self, *, adapter: Any, model_path: str, revision: str | None, device: str, dtype: torch.dtype) -> None:
        missing = [name for name in ("load_embedded_model", "pack_initial_noise") if not hasattr(adapter, name)]
        if missing:
            raise RolloutError(
                f"adapter {type(adapter).__name__} cannot serve the embedded engine: it lacks {', '.join(missing)}",
                expected="an adapter with the EmbeddedModelAdapter protocol, or another --rollout-engine",
            )
        self.policy_version = 0
        self._adapter = adapter
        self._load = {"model_path": model_path, "revision": revision, "device": device, "dtype": dtype}
        self._device = torch.device(device)
        self._model: Any = None
        self._adapter_config: dict[str, object] | None = None
        self._full_synced = False
        self._manifest: FullWeightManifest | None = None
        self._staged: dict[str, Tensor] = {}
        self._before: tuple[int, bool, dict[str, Tensor]] | None = None

    def start(self) -> None:
        """Load every component of the pipeline."""
        self._model = self._adapter.load_embedded_model(**self._load)
        self._model.transformer.requires_grad_(False)

    def shutdown(self) -> None:
        """Drop the model."""
        self._model = None
        self._staged = {}

    def release(self) -> None:
        """Nothing to do: the embedded engine keeps its memory (it is meant for small models)."""

    def resume(self, *, weights_only: bool = False) -> None:
        """Nothing to do, see `release`."""

    @torch.inference_mode()
    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutResponse]:
        """Sample every group; see `RolloutEngine.generate`."""
        if self._model is None:
            raise RolloutError("generate was called before start")
        for request in requests:
            if request.plan.policy_version != self.policy_version:
                raise RolloutError(
                    f"policy version mismatch: the engine holds {self.policy_version}, "
                    f"the request is for {request.plan.policy_version}",
                    where=f"group {request.plan.group_index}",
                )
            if request.sigmas is None:
                raise RolloutError(
                    "the embedded engine computes no schedule of its own", expected="driver_sigmas: true"
                )
        if not requests:
            return []
        conditions, truncated = self._model.encode_prompts([request.plan.prompt for request in requests])
        return [
            self._generate_group(request, condition, cut)
            for request, condition, cut in zip(requests, conditions, truncated, strict=True)
        ]

    def _generate_group(self, request: RolloutRequest, condition: dict[str, Tensor], cut: bool) -> RolloutResponse:
        plan, steps = request.plan, request.num_inference_steps
        assert request.sigmas is not None
        sigmas = torch.tensor(request.sigmas, device=self._device)
        count = len(plan.sample_ids)
        noise = seeded_noise(plan.initial_noise_seeds, request.latent_shape, device=self._device)
        latents = self._adapter.pack_initial_noise(noise).float()
        trained = frozenset(plan.sde_indices)
        states, log_probs = [latents], []
        for step in range(steps):
            here, after = sigmas[step].expand(count), sigmas[step + 1].expand(count)
            batch = ReplayBatch(
                latents=latents,
                sigmas=here,
                conditions=(condition,) * count,
                height=request.height,
                width=request.width,
            )
            velocity = self._adapter.replay_transition(self._model.transformer, batch)
            if step in trained:
                drawn = seeded_noise([seeds[step] for seeds in plan.denoise_seeds], latents.shape[1:])
                latents, log_prob = sde_step(
                    latents,
                    velocity,
                    drawn.to(self._device),
                    here,
                    after,
                    eta=request.eta,
                    sde_type=request.sde_type,
                    sigma_clamp=request.sigmas[1],
                )
            else:
                latents = ode_step(latents, velocity, here, after)
                log_prob = torch.zeros(count, device=self._device)
            states.append(latents)
            log_probs.append(log_prob)
        pixels = self._model.decode_latents(latents, height=request.height, width=request.width)
        return RolloutResponse(
            trajectory_latents=torch.stack(states, dim=1).cpu(),
            sigmas=sigmas.cpu(),
            timesteps=(sigmas[:-1] * 1000).cpu(),
            rollout_log_probs=torch.stack(log_probs, dim=1).cpu(),
            sde_indices=plan.sde_indices,
            conditions={name: value.cpu() for name, value in condition.items()},
            media={"image": pixels.cpu()},
            height=request.height,
            width=request.width,
            policy_version=self.policy_version,
            engine="local",
            truncated_prompts=int(cut),
        )

    def begin_sync(self, manifest: FullWeightManifest, adapter: dict[str, object] | None = None) -> None:
        """Open a sync; a LoRA sync wraps the layers the first time. See `RolloutEngine.begin_sync`."""
        # First, so that an abort after a refusal below does not undo the sync before this one.
        self._manifest, self._staged, self._before = None, {}, None
        if (manifest.mode == "adapter") != (adapter is not None):
            raise WeightSyncError(f"a sync in mode {manifest.mode!r} came with adapter={adapter!r}")
        if manifest.mode == "full" and self._adapter_config is not None:
            raise WeightSyncError("a full sync came after an adapter sync: wrapped layers would miss every base weight")
        if manifest.mode == "adapter" and self._full_synced:
            raise WeightSyncError("an adapter sync came after a full sync: the base is no longer the one it was for")
        if adapter is not None:
            if self._adapter_config is None:
                # B is zero, so wrapping alone changes no output: a rollback may leave the layers wrapped.
                inject_lora(self._model.transformer, **adapter)  # type: ignore[arg-type]
                self._adapter_config = adapter
            elif self._adapter_config != adapter:
                raise WeightSyncError(f"the adapter changed from {self._adapter_config} to {adapter}")
        self._manifest = manifest

    def receive(self, bucket: WeightBucket) -> None:
        """Stage one bucket; see `RolloutEngine.receive`."""
        if self._manifest is None:
            raise WeightSyncError(f"bucket {bucket.index} came without begin_sync")
        twice = sorted(set(bucket.tensors) & set(self._staged))
        if twice:
            raise WeightSyncError(f"tensors came twice: {twice[:5]}", where=f"bucket {bucket.index}")
        # Copied: the sender's memory may be shared and reused.
        self._staged |= {name: tensor.detach().clone() for name, tensor in bucket.tensors.items()}

    @torch.no_grad()
    def commit_sync(self, policy_version: int) -> str:
        """Check everything, then copy; see `RolloutEngine.commit_sync`."""
        manifest, staged = self._manifest, self._staged
        if manifest is None:
            raise WeightSyncError("commit_sync came without begin_sync")
        arrived = (
            FullWeightManifest.describe(
                manifest.mode,
                (
                    (name, tuple(tensor.shape), tensor.numel() * tensor.element_size())
                    for name, tensor in staged.items()
                ),
            )
            if staged
            else None
        )
        if arrived != manifest:
            raise WeightSyncError(f"what arrived is not what was announced: {arrived!r}", expected=repr(manifest))
        targets = self._sync_targets(manifest.mode)
        renamed = {self._engine_name(manifest.mode, name): tensor for name, tensor in staged.items()}
        unknown, missing = sorted(set(renamed) - set(targets)), sorted(set(targets) - set(renamed))
        if unknown or missing:
            transformer = type(self._model.transformer).__name__
            raise WeightSyncError(
                f"{len(unknown)} unknown names (first: {unknown[:3]}), "
                f"{len(missing)} names missing (first: {missing[:3]})",
                expected=f"exactly the {len(targets)} {manifest.mode} tensors of {transformer}",
            )
        for name, tensor in renamed.items():
            if tensor.shape != targets[name].shape:
                raise WeightSyncError(
                    f"{name}: shape {list(tensor.shape)} came", expected=str(list(targets[name].shape))
                )
            if not bool(tensor.isfinite().all()):
                raise WeightSyncError(f"{name}: NaN or infinite values came")
        # Kept until the next sync begins: another engine may refuse this version after we took it.
        earlier = {name: targets[name].detach().clone() for name in renamed}
        self._before = (self.policy_version, self._full_synced, earlier)
        for name, tensor in renamed.items():
            targets[name].copy_(tensor)
        checksum = tensor_checksum(
            (name, targets[self._engine_name(manifest.mode, name)].to(tensor.dtype)) for name, tensor in staged.items()
        )
        self._full_synced = self._full_synced or manifest.mode == "full"
        self.policy_version = policy_version
        self._manifest, self._staged = None, {}
        return checksum

    @torch.no_grad()
    def abort_sync(self) -> None:
        """Forget what was staged; undo a commit of this same sync. See `RolloutEngine.abort_sync`."""
        if self._before is not None:
            self.policy_version, self._full_synced, earlier = self._before
            parameters = dict(self._model.transformer.named_parameters())
            for name, tensor in earlier.items():
                parameters[name].copy_(tensor)
        self._manifest, self._staged, self._before = None, {}, None

    def _sync_targets(self, mode: str) -> dict[str, Tensor]:
        parameters = dict(self._model.transformer.named_parameters())
        if mode == "adapter":
            return {name: tensor for name, tensor in parameters.items() if is_lora_name(name)}
        return parameters

    @staticmethod
    def _engine_name(mode: str, wire_name: str) -> str:
        return (to_peft_name(wire_name) or wire_name) if mode == "adapter" else wire_name
