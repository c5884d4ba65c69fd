"""What the entry point ``qwen_image`` registers. Import strings only: listing plug-ins loads no model library."""

from __future__ import annotations

from collections.abc import Callable

from relax_sdk import ModelSpec, hookimpl

__all__ = ["relax_register_models"]


@hookimpl
def relax_register_models(register: Callable[[ModelSpec], None]) -> None:
    """Register the model family and its presets."""
    register(
        ModelSpec(
            name="qwen_image",
            adapter="relax_qwen_image.adapter:QwenImageAdapter",
            tasks=("t2i",),
            description="Qwen-Image text-to-image, trained through diffusers' transformer",
            presets={
                "tiny": "relax_qwen_image.presets:tiny",
                "lora": "relax_qwen_image.presets:lora",
                "full": "relax_qwen_image.presets:full",
            },
            default_preset="tiny",
        )
    )
