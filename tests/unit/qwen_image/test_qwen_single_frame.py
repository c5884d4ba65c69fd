"""One frame through the flattened convolutions is one frame through diffusers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from relax_qwen_image.single_frame import single_frame


@torch.no_grad()
def test_encoding_and_decoding_are_unchanged(pipeline: Any) -> None:
    vae = pipeline.vae
    pictures = torch.rand(2, 3, 1, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = vae.encode(pictures).latent_dist.mode()
    decoded = vae.decode(latents).sample
    with single_frame(vae):
        flat = vae.encode(pictures).latent_dist.mode()
        again = vae.decode(latents).sample
    torch.testing.assert_close(flat, latents, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, decoded, rtol=1e-4, atol=1e-4)
    # Outside the block the module is as it was.
    assert torch.equal(vae.decode(latents).sample, decoded)


@torch.no_grad()
def test_two_frames_are_refused(pipeline: Any) -> None:
    with single_frame(pipeline.vae), pytest.raises(ValueError, match="one frame, came 2"):
        pipeline.vae.decoder.conv_in(torch.zeros(1, 16, 2, 4, 4))


def test_every_causal_convolution_is_found(pipeline: Any) -> None:
    """Save those that halve the number of frames, which a single frame never meets."""
    causal = {n: m for n, m in pipeline.vae.named_modules() if type(m).__name__ == "QwenImageCausalConv3d"}
    with single_frame(pipeline.vae):
        left = [name for name, module in causal.items() if "forward" not in vars(module)]
    assert len(causal) > 20
    assert all(name.startswith("encoder.") and name.endswith(".time_conv") for name in left)
