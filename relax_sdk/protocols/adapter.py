"""What a model family implements: `GenerativeModelAdapter`, and optionally `EmbeddedModelAdapter`.

An adapter holds no state of a run: its methods are called in the driver, in the engines and on every training rank,
each in a process of its own. It returns velocities; schedule, transition and log-probability are the core's
(`relax_sdk.flow`), so that no family can disagree with the trainer about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from relax_sdk.protocols.records import GroupPlan, ReplayBatch, RolloutRequest, RolloutResponse, Trajectory
    from relax_sdk.protocols.sampling import SamplingConfig
    from relax_sdk.protocols.tensors import Tensor

__all__ = ["EmbeddedModel", "EmbeddedModelAdapter", "GenerativeModelAdapter", "SGLangModelAdapter"]


@runtime_checkable
class GenerativeModelAdapter(Protocol):
    """A model family, constructed without arguments.

    Attributes:
        family: the key of the family, e.g. ``"qwen_image"``.
        supported_tasks: tasks with a working replay path, e.g. ``("t2i",)``.
        lora_target_modules: default suffixes of the modules that LoRA wraps.
        block_module_names: attribute paths, on the trained module, of the ``ModuleList``s whose items are sharded
            (FSDP2) and checkpointed one by one.
    """

    family: str
    supported_tasks: tuple[str, ...]
    lora_target_modules: tuple[str, ...]
    block_module_names: tuple[str, ...]

    def load_train_model(self, model_path: str, *, revision: str | None, dtype: torch.dtype) -> Any:
        """Load what the trainer needs, on the CPU, as a bundle whose ``--fsdp-trainable-attr`` is the module.

        Only the trained component is read (``transformer/``); VAE and text encoder belong to the engine.

        Raises:
            ConfigError: the folder lacks what the family needs, with the missing part named.
        """
        ...

    def validate_sampling(self, sampling: SamplingConfig) -> list[str]:
        """Texts of what the family cannot sample, e.g. a size off its grid, each with the nearest valid value.

        Called by preflight: must import neither torch nor the model library.
        """
        ...

    def build_rollout_request(
        self, plan: GroupPlan, sampling: SamplingConfig, *, scheduler_config: Mapping[str, Any]
    ) -> RolloutRequest:
        """Complete a group's plan with geometry, schedule and latent shape.

        Args:
            plan: the driver's decisions for the group.
            sampling: the ``--sampling-config``.
            scheduler_config: the checkpoint's own ``scheduler/scheduler_config.json``.

        Raises:
            ConfigError: ``guidance_scale`` other than 1.0, or a size the family cannot draw.
        """
        ...

    def validate_rollout_response(self, request: RolloutRequest, response: RolloutResponse) -> None:
        """Refuse a response that does not answer its request.

        Raises:
            RolloutError: listing everything that is missing or differs.
        """
        ...

    def pack_trajectory(self, request: RolloutRequest, response: RolloutResponse) -> Trajectory:
        """Keep what the trainer replays: latents around the trained steps, frozen conditions, schedule."""
        ...

    def replay_transition(self, model: Any, batch: ReplayBatch) -> Tensor:
        """One conditional forward.

        Args:
            model: the trained module (or the engine's copy of it).
            batch: latents [B, N, C] float32, sigmas [B] float32 and a condition per row.

        Returns:
            The velocity [B, N, C], float32. Row b must not depend on the other rows.
        """
        ...

    def artifact_tracks(self) -> tuple[str, ...]:
        """The media tracks a rollout produces, e.g. ``("image",)``."""
        ...

    def weight_name_map(self) -> Callable[[str], str]:
        """Maps a parameter name of the trained module to its name in the engine."""
        ...


@runtime_checkable
class EmbeddedModel(Protocol):
    """The frozen parts and a transformer of its own, for the embedded engine.

    Attributes:
        transformer: the module that weight sync writes into and `replay_transition` runs.
    """

    transformer: Any

    def encode_prompts(self, prompts: Sequence[str]) -> tuple[list[dict[str, Tensor]], list[bool]]:
        """Frozen text conditions, one mapping per prompt without a batch axis or padding; and which were cut."""
        ...

    def decode_latents(self, latents: Tensor, *, height: int, width: int) -> Tensor:
        """Decode x_0 [B, N, C] float32 to pixels [B, 3, H, W] uint8."""
        ...


@runtime_checkable
class EmbeddedModelAdapter(Protocol):
    """Optional second protocol: an adapter that can also serve the embedded engine ``local``."""

    def load_embedded_model(
        self, model_path: str, *, revision: str | None, device: str, dtype: torch.dtype
    ) -> EmbeddedModel:
        """Load the whole pipeline for sampling.

        Raises:
            ConfigError: the folder lacks a component, which is named.
        """
        ...

    def pack_initial_noise(self, noise: Tensor) -> Tensor:
        """Turn noise drawn in ``RolloutRequest.latent_shape`` [K, *latent_shape] into tokens [K, N, C]."""
        ...


@runtime_checkable
class SGLangModelAdapter(Protocol):
    """Optional third protocol: an adapter whose family SGLang serves.

    Attributes:
        sglang_model_id: the short name under which SGLang knows the family, e.g. ``"Qwen-Image"``.
        sglang_sampling_params: further sampling parameters that every request carries.
    """

    sglang_model_id: str
    sglang_sampling_params: Mapping[str, Any]

    def conditions_from_sglang(self, pos_cond_kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Frozen text conditions of one candidate, in the layout of `replay_transition`.

        Args:
            pos_cond_kwargs: what SGLang recorded as the transformer's positive conditions.

        Raises:
            RolloutError: something is missing, or says that the prompt was padded into the result.
        """
        ...

    def sglang_text_was_cut(self, conditions: Mapping[str, Tensor]) -> bool:
        """Whether these conditions fill the family's text window, so that the prompt may have been longer."""
        ...

    def pack_initial_noise(self, noise: Tensor) -> Tensor:
        """As `EmbeddedModelAdapter.pack_initial_noise`: compared with the x_T that SGLang recorded."""
        ...
