"""The whole Qwen-Image pipeline in one process, for the embedded engine: prompts in, pixels out.

The denoising loop itself is the engine's; it runs `QwenImageAdapter.replay_transition` on `transformer`, so that
sampling and replay share one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relax_qwen_image.folder import PIPELINE_PARTS
from relax_qwen_image.geometry import unpack_tokens
from relax_qwen_image.loading import (
    load_text_encoder,
    load_tokenizer,
    load_transformer,
    load_vae,
    require_folder,
)
from relax_qwen_image.single_frame import single_frame
from relax_qwen_image.text import check_tokenizer, encode_prompt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["QwenImageEmbeddedModel", "load_embedded_model"]

DECODE_PIXELS = 2**20
"""Pixels decoded at once, at most (one picture at least): the decoder's activations grow with them."""


class QwenImageEmbeddedModel:
    """An `EmbeddedModel`: frozen text encoder and VAE, and a transformer that weight sync writes into.

    Args:
        transformer: `QwenImageTransformer2DModel`.
        vae: `AutoencoderKLQwenImage`.
        text_encoder: `Qwen2_5_VLForConditionalGeneration`.
        tokenizer: the checkpoint's tokenizer.
    """

    def __init__(self, *, transformer: Any, vae: Any, text_encoder: Any, tokenizer: Any) -> None:
        self.transformer = transformer
        self.vae = vae
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer

    def encode_prompts(self, prompts: Sequence[str]) -> tuple[list[dict[str, Tensor]], list[bool]]:
        """Encode prompts independently of each other.

        Returns:
            Per prompt ``{"encoder_hidden_states": [L, D]}`` in the encoder's dtype, without padding; and whether the
            prompt was cut at 512 tokens (the template's ending counts).
        """
        encoded = [encode_prompt(p, tokenizer=self.tokenizer, text_encoder=self.text_encoder) for p in prompts]
        return [{"encoder_hidden_states": states} for states, _ in encoded], [cut for _, cut in encoded]

    def decode_latents(self, latents: Tensor, *, height: int, width: int) -> Tensor:
        """Decode tokens x_0 [B, N, 64] float32 to pixels [B, 3, H, W] uint8, on the latents' device.

        Convolutions round differently by batch size, which moves a few pixels in 100,000 by one grey level.
        """
        import torch

        chunk = max(1, DECODE_PIXELS // (height * width))
        with torch.no_grad(), single_frame(self.vae):
            return torch.cat([self._decode(part, height=height, width=width) for part in latents.split(chunk)])

    def _decode(self, latents: Tensor, *, height: int, width: int) -> Tensor:
        import torch

        # The VAE is a video model: axis 2 is time, and a picture is one frame.
        latent_BCTHW = unpack_tokens(latents, height=height, width=width).unsqueeze(2)
        latent_BCTHW = latent_BCTHW.to(device=self.vae.device, dtype=self.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        # Dividing by 1 / std, in the VAE's dtype, is the published pipeline's order of rounding.
        latent_BCTHW = latent_BCTHW / (1.0 / std).to(latent_BCTHW) + mean.to(latent_BCTHW)
        pixels_B3HW = self.vae.decode(latent_BCTHW, return_dict=False)[0][:, :, 0]
        pixels_B3HW = (pixels_B3HW * 0.5 + 0.5).clamp(0, 1).float()
        return (pixels_B3HW * 255).round().to(torch.uint8).to(latents.device)


def load_embedded_model(
    model_path: str, *, revision: str | None, device: str, dtype: torch.dtype
) -> QwenImageEmbeddedModel:
    """Load every component of a pipeline folder, frozen and in evaluation mode.

    Args:
        model_path: a local folder.
        revision: kept for the record; selects nothing inside a local folder.
        device: where all components live, e.g. ``"cuda"``.
        dtype: of all weights.

    Raises:
        ConfigError: a component is missing, broken, or does not fit.
    """
    require_folder(model_path, PIPELINE_PARTS)
    tokenizer = load_tokenizer(model_path, revision=revision)
    check_tokenizer(tokenizer)
    return QwenImageEmbeddedModel(
        transformer=load_transformer(model_path, revision=revision, dtype=dtype).requires_grad_(False).to(device),
        vae=load_vae(model_path, revision=revision, dtype=dtype).requires_grad_(False).to(device),
        text_encoder=load_text_encoder(model_path, revision=revision, dtype=dtype).requires_grad_(False).to(device),
        tokenizer=tokenizer,
    )
