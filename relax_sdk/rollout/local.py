"""The embedded engine ``local``: the model family's own pipeline, sampled in this process.

It shares `relax_sdk.flow` and the adapter's forward with the trainer, runs on a CPU or a GPU, and is the reference
that other engines are compared with. One forward serves the candidates of one group, never of two, so a group's
result does not depend on what else is in the request. It leaves out: batching across groups and any fast kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import ConfigError, RolloutError, WeightSyncError, nearest_name
from relax_sdk.flow import ode_step, sde_step, seeded_noise
from relax_sdk.protocols import (
    AdapterConfig,
    EngineSettings,
    ReplayBatch,
    RolloutRequest,
    RolloutResponse,
    SyncOffer,
    WeightBucket,
)
from relax_sdk.weights import (
    OpenBuffer,
    buffer_for,
    bytes_checksum,
    combine_checksums,
    inject_lora,
    is_lora_name,
    lora_shapes,
    to_peft_name,
    to_wire_name,
)

__all__ = ["LocalEngine"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class LocalEngine:
    """A `RolloutEngine` around an `EmbeddedModelAdapter`.

    Args:
        adapter: the model family; needs `load_embedded_model` and `pack_initial_noise`.
        settings: model, device, compute dtype, and which weight syncs will come.
    """

    def __init__(self, *, adapter: Any, settings: EngineSettings) -> None:
        missing = [name for name in ("load_embedded_model", "pack_initial_noise") if not hasattr(adapter, name)]
        if missing:
            raise RolloutError(
                f"adapter {type(adapter).__name__} cannot serve the embedded engine: it lacks {', '.join(missing)}",
                expected="an adapter with the EmbeddedModelAdapter protocol, or another --rollout-engine",
            )
        self.policy_version = 0
        self._adapter = adapter
        self._settings = settings
        self._device = torch.device(settings.device)
        self._model: Any = None
        self._adapter_config: AdapterConfig | None = None
        self._offer: SyncOffer | None = None
        self._buffer: OpenBuffer | None = None
        self._staged: list[tuple[WeightBucket, Tensor]] = []
        self._before: tuple[int, dict[str, Tensor]] | None = None

    def start(self) -> None:
        """Load every component of the pipeline."""
        self._model = self._adapter.load_embedded_model(
            model_path=self._settings.model_path,
            revision=self._settings.revision,
            device=self._settings.device,
            dtype=_DTYPES[self._settings.dtype],
        )
        self._model.transformer.requires_grad_(False)

    def shutdown(self) -> None:
        """Drop the model."""
        self._end_sync()
        self._model = self._before = None

    def problem(self) -> str | None:
        """None: the engine lives and dies with this process."""
        return None

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
        plan = request.plan
        assert request.sigmas is not None
        sigmas = torch.tensor(request.sigmas, device=self._device)
        count = len(plan.sample_ids)
        together = self._settings.candidates_per_request or count
        parts = [
            self._sample(request, condition, sigmas, slice(start, min(start + together, count)))
            for start in range(0, count, together)
        ]
        latents, log_probs, pixels = (torch.cat(items).cpu() for items in zip(*parts, strict=True))
        return RolloutResponse(
            trajectory_latents=latents,
            sigmas=sigmas.cpu(),
            timesteps=(sigmas[:-1] * 1000).cpu(),
            rollout_log_probs=log_probs,
            sde_indices=plan.sde_indices,
            conditions={name: value.cpu() for name, value in condition.items()},
            media={"image": pixels},
            height=request.height,
            width=request.width,
            policy_version=self.policy_version,
            engine="local",
            truncated_prompts=int(cut),
        )

    def _sample(
        self, request: RolloutRequest, condition: dict[str, Tensor], sigmas: Tensor, candidates: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Some candidates of a group in one batch: latents [K, T+1, N, C], log-probabilities [K, T], pixels."""
        plan, steps = request.plan, request.num_inference_steps
        assert request.sigmas is not None
        seeds_of_part = plan.denoise_seeds[candidates]
        count = len(seeds_of_part)
        noise = seeded_noise(plan.initial_noise_seeds[candidates], request.latent_shape, device=self._device)
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
                drawn = seeded_noise([seeds[step] for seeds in seeds_of_part], latents.shape[1:])
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
        return torch.stack(states, dim=1), torch.stack(log_probs, dim=1), pixels

    def begin_sync(self, offer: SyncOffer) -> None:
        """Check names, shapes and modes, and open the buffer; a LoRA sync wraps the layers the first time.

        See `RolloutEngine.begin_sync`.
        """
        self._end_sync()
        # First, so that an abort after a refusal below does not undo the sync before this one.
        self._before = None
        if self._model is None:
            raise WeightSyncError("begin_sync was called before start")
        if offer.manifest.mode != self._settings.sync_mode:
            raise WeightSyncError(f"sync mode {offer.manifest.mode!r} came", expected=repr(self._settings.sync_mode))
        if self._adapter_config is not None and offer.adapter != self._adapter_config:
            raise WeightSyncError(f"the adapter changed from {self._adapter_config!r} to {offer.adapter!r}")
        self._check_names(offer, self._expected(offer.adapter))
        self._buffer = OpenBuffer.open(buffer_for(offer.buffers, self._device), self._device)
        if offer.adapter is not None and self._adapter_config is None:
            # B is zero, so wrapping alone changes no output: a rollback leaves the layers wrapped.
            inject_lora(self._model.transformer, **dict(offer.adapter))
            self._adapter_config = offer.adapter
        self._offer = offer

    def receive(self, bucket: WeightBucket) -> None:
        """Stage a copy of one bucket; see `RolloutEngine.receive`."""
        offer, buffer = self._offer, self._buffer
        if offer is None or buffer is None:
            raise WeightSyncError(f"bucket {bucket.index} came without begin_sync")
        due = (len(self._staged), sum(earlier.count for earlier, _ in self._staged))
        if (bucket.index, bucket.first) != due:
            raise WeightSyncError(
                f"bucket {bucket.index} came with tensor {bucket.first} first",
                expected=f"bucket {due[0]}, tensor {due[1]} first",
            )
        try:
            offer.entries(bucket)
        except ValueError as error:
            raise WeightSyncError(str(error)) from error
        sent = buffer.slot(bucket.slot)
        if bucket.bytes > sent.numel():
            raise WeightSyncError(f"bucket {bucket.index} has {bucket.bytes} bytes, its slot {sent.numel()}")
        # Copied before it is checked: what was checked is then what is kept.
        copy = sent[: bucket.bytes].clone()
        came = bytes_checksum(copy)
        if came != bucket.checksum:
            raise WeightSyncError(f"bucket {bucket.index} came with checksum {came}", expected=bucket.checksum)
        self._staged.append((bucket, copy))

    @torch.no_grad()
    def commit_sync(self, policy_version: int) -> str:
        """Check that everything is there and finite, then copy; see `RolloutEngine.commit_sync`."""
        offer = self._offer
        if offer is None:
            raise WeightSyncError("commit_sync came without begin_sync")
        arrived = sum(bucket.count for bucket, _ in self._staged)
        if arrived != len(offer.tensors):
            raise WeightSyncError(f"{arrived} tensors came", expected=f"{len(offer.tensors)}, as announced")
        dtype = torch.bfloat16 if offer.dtype == "bfloat16" else torch.float32
        tensors: dict[str, Tensor] = {}
        for bucket, data in self._staged:
            for name, shape, offset in offer.entries(bucket):
                size = dtype.itemsize * math.prod(shape)
                tensors[name] = data[offset : offset + size].view(dtype).view(shape)
                if not bool(tensors[name].isfinite().all()):
                    raise WeightSyncError(f"{name}: NaN or infinite values came")
        parameters = dict(self._model.transformer.named_parameters())
        targets = {name: parameters[self._engine_name(name)] for name in tensors}
        # Kept until the next sync begins: another engine may refuse this version after we took it.
        earlier = {self._engine_name(name): target.detach().clone() for name, target in targets.items()}
        self._before = (self.policy_version, earlier)
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        held = [
            bytes_checksum(
                torch.cat([targets[name].to(dtype).reshape(-1) for name, _, _ in offer.entries(bucket)])
                .view(torch.uint8)
                .contiguous()
            )
            for bucket, _ in self._staged
        ]
        self.policy_version = policy_version
        self._end_sync()
        return combine_checksums(held)

    @torch.no_grad()
    def abort_sync(self) -> None:
        """Forget what was staged; undo a commit of this same sync. See `RolloutEngine.abort_sync`."""
        self._end_sync()
        if self._before is not None:
            self.policy_version, earlier = self._before
            parameters = dict(self._model.transformer.named_parameters())
            for name, tensor in earlier.items():
                parameters[name].copy_(tensor)
        self._before = None

    def _end_sync(self) -> None:
        """Drop the current sync's copies and mapping."""
        if self._buffer is not None:
            self._buffer.close()
        self._offer, self._buffer, self._staged = None, None, []

    def _expected(self, adapter: AdapterConfig | None) -> dict[str, tuple[int, ...]]:
        """Wire names and shapes of exactly what a sync must bring, without touching the model."""
        transformer = self._model.transformer
        if adapter is None:
            return {name: tuple(tensor.shape) for name, tensor in transformer.named_parameters()}
        if self._adapter_config is not None:
            return {
                to_wire_name(name): tuple(tensor.shape)
                for name, tensor in transformer.named_parameters()
                if is_lora_name(name)
            }
        try:
            return lora_shapes(transformer, rank=adapter.rank, target_modules=adapter.target_modules)
        except ConfigError as error:
            raise WeightSyncError(error.what, expected=error.expected) from error

    def _check_names(self, offer: SyncOffer, expected: Mapping[str, tuple[int, ...]]) -> None:
        came = dict(offer.tensors)
        if len(came) != len(offer.tensors):
            raise WeightSyncError(f"{len(offer.tensors)} tensors with {len(came)} names were announced")
        unknown, missing = sorted(set(came) - set(expected)), sorted(set(expected) - set(came))
        if unknown or missing:
            raise WeightSyncError(
                f"{len(unknown)} unknown names (first: {unknown[:3]}), "
                f"{len(missing)} names missing (first: {missing[:3]})",
                expected=f"exactly the {len(expected)} {offer.manifest.mode} tensors of "
                f"{type(self._model.transformer).__name__}",
                nearest=nearest_name(unknown[0], missing) if unknown else None,
            )
        for name, shape in offer.tensors:
            if shape != expected[name]:
                raise WeightSyncError(f"{name}: shape {list(shape)} was announced", expected=str(list(expected[name])))

    def _engine_name(self, wire_name: str) -> str:
        if self._settings.sync_mode == "full":
            return wire_name
        name = to_peft_name(wire_name)
        assert name is not None, "begin_sync lets only adapter names in"
        return name
