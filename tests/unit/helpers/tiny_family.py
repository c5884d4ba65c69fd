"""A model family of a few hundred parameters that implements both adapter protocols, for tests of the core rooms.

Its transformer has two blocks in a ``ModuleList``, linear layers that LoRA can wrap, and depends on sigma and text.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relax_sdk.flow import flow_match_sigmas
from relax_sdk.protocols import (
    GroupPlan,
    ReplayBatch,
    RolloutRequest,
    RolloutResponse,
    SamplingConfig,
    Trajectory,
)

SIDE, CHANNELS, WIDTH = 4, 4, 8
TOKENS = SIDE * SIDE
STEPS = 6
SCHEDULER: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.to_out(torch.tanh(self.to_q(hidden)))


class TinyTransformer(nn.Module):
    """velocity = f(latents [B, N, C], sigmas [B], text [B])."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.proj_in = nn.Linear(CHANNELS + 2, WIDTH)
        self.blocks = nn.ModuleList([TinyBlock(), TinyBlock()])
        self.proj_out = nn.Linear(WIDTH, CHANNELS)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, latents: Tensor, sigmas: Tensor, text: Tensor) -> Tensor:
        extra = torch.stack([sigmas, text], dim=-1)[:, None].expand(-1, latents.shape[1], -1)
        hidden = self.proj_in(torch.cat([latents, extra.to(latents.dtype)], dim=-1))
        for block in self.blocks:
            hidden = block(hidden)
        # A copy, because a linear layer's 3-D output is a view, which FSDP2 warns about.
        return self.proj_out(hidden).clone()


class TinyEmbedded:
    """The embedded model: the text is its mean byte, the pixels are squashed latents."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer

    def encode_prompts(self, prompts: Sequence[str]) -> tuple[list[dict[str, Tensor]], list[bool]]:
        texts = [torch.tensor([list(prompt.encode()) or [0]]).float().reshape(-1, 1) / 255 for prompt in prompts]
        return [{"encoder_hidden_states": text} for text in texts], [len(prompt) > 30 for prompt in prompts]

    def decode_latents(self, latents: Tensor, *, height: int, width: int) -> Tensor:
        rows = latents[..., :3].transpose(1, 2).reshape(-1, 3, height, width)
        return (torch.sigmoid(rows) * 255).to(torch.uint8)


class TinyAdapter:
    """Implements `GenerativeModelAdapter` and `EmbeddedModelAdapter`."""

    family = "tiny"
    supported_tasks = ("t2i",)
    lora_target_modules = ("to_q", "to_out")
    block_module_names = ("blocks",)

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.forwards: list[tuple[bool, Tensor]] = []
        """(grad mode, latents) of every forward, for tests that ask what was replayed."""

    def load_train_model(self, model_path: str, *, revision: str | None, dtype: torch.dtype) -> Any:
        return types.SimpleNamespace(transformer=TinyTransformer(self.seed).to(dtype))

    def load_embedded_model(
        self, model_path: str, *, revision: str | None, device: str, dtype: torch.dtype
    ) -> TinyEmbedded:
        return TinyEmbedded(TinyTransformer(self.seed).to(device=device, dtype=dtype))

    def validate_sampling(self, sampling: SamplingConfig) -> list[str]:
        return []

    def build_rollout_request(
        self, plan: GroupPlan, sampling: SamplingConfig, *, scheduler_config: Mapping[str, Any]
    ) -> RolloutRequest:
        return RolloutRequest(
            plan=plan,
            height=SIDE,
            width=SIDE,
            num_inference_steps=sampling.num_inference_steps,
            eta=sampling.eta,
            sde_type=sampling.sde_type,
            sigmas=flow_match_sigmas(sampling.num_inference_steps, TOKENS, scheduler_config),
            latent_shape=(CHANNELS, SIDE, SIDE),
        )

    def validate_rollout_response(self, request: RolloutRequest, response: RolloutResponse) -> None:
        return None

    def pack_trajectory(self, request: RolloutRequest, response: RolloutResponse) -> Trajectory:
        steps = list(response.sde_indices)
        return Trajectory(
            sigmas=response.sigmas,
            timesteps=response.timesteps,
            sde_indices=torch.tensor(steps),
            sample_indices=torch.arange(len(request.plan.sample_ids)),
            rollout_log_probs=response.rollout_log_probs[:, steps],
            latents=response.trajectory_latents[:, steps],
            next_latents=response.trajectory_latents[:, [step + 1 for step in steps]],
            conditions=response.conditions,
            height=request.height,
            width=request.width,
            policy_version=response.policy_version,
            group_index=request.plan.group_index,
            rollout_id=request.plan.rollout_id,
            sde_type=request.sde_type,
            eta=request.eta,
            sigma_clamp=float(response.sigmas[1]),
            seed_hash="0" * 64,
        )

    def replay_transition(self, model: Any, batch: ReplayBatch) -> Tensor:
        self.forwards.append((torch.is_grad_enabled(), batch.latents.detach().clone()))
        dtype = next(model.parameters()).dtype
        text = torch.stack([condition["encoder_hidden_states"].mean() for condition in batch.conditions])
        return model(batch.latents.to(dtype), batch.sigmas.to(dtype), text.to(dtype)).float()

    def artifact_tracks(self) -> tuple[str, ...]:
        return ("image",)

    def weight_name_map(self) -> Callable[[str], str]:
        return lambda name: name

    def pack_initial_noise(self, noise: Tensor) -> Tensor:
        return noise.flatten(2).transpose(1, 2)


class RowwiseTinyAdapter(TinyAdapter):
    """One row per forward, so that matrix kernels cannot make a row depend on how many there are."""

    def replay_transition(self, model: Any, batch: ReplayBatch) -> Tensor:
        rows = [
            super(RowwiseTinyAdapter, self).replay_transition(
                model,
                ReplayBatch(
                    latents=batch.latents[row : row + 1],
                    sigmas=batch.sigmas[row : row + 1],
                    conditions=batch.conditions[row : row + 1],
                    height=batch.height,
                    width=batch.width,
                ),
            )
            for row in range(batch.latents.shape[0])
        ]
        return torch.cat(rows)


def reference_moments(
    x: Tensor, v: Tensor, sigma: float, sigma_next: float, *, eta: float, sde_type: str, clamp: float
) -> tuple[Tensor, float]:
    """Mean and tau of one transition in float64, written independently of relax_sdk.flow; one sigma for all rows."""
    x, v = x.double(), v.double()
    delta = sigma_next - sigma
    if sde_type == "cps":
        tau = sigma_next * float(torch.sin(torch.tensor(eta * torch.pi / 2, dtype=torch.float64)))
        return (x - sigma * v) * (1 - sigma_next) + (x + (1 - sigma) * v) * (sigma_next**2 - tau**2) ** 0.5, tau
    tilde = clamp if sigma == 1.0 else sigma
    s = eta if sde_type == "dance" else eta * (sigma / (1 - tilde)) ** 0.5
    mean = x * (1 + s**2 * delta / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * delta
    return mean, s * (-delta) ** 0.5


def reference_log_prob(after: Tensor, mean: Tensor, tau: float) -> Tensor:
    """Mean over all but the first dimension of the normal log-density, by `torch.distributions`, float64."""
    return torch.distributions.Normal(mean, tau).log_prob(after.double()).flatten(1).mean(1)
