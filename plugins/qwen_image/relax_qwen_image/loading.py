"""Loads single components of a Qwen-Image folder, and refuses weights that do not fit. Imports torch when called."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from relax_qwen_image.folder import folder_problems
from relax_sdk import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "TrainBundle",
    "load_text_encoder",
    "load_tokenizer",
    "load_transformer",
    "load_vae",
    "require_folder",
]

_LAYOUT = "a local folder in the layout of the published Qwen-Image checkpoint"


@dataclasses.dataclass(frozen=True)
class TrainBundle:
    """What the trainer loads: ``--fsdp-trainable-attr transformer`` names the module that is trained."""

    transformer: torch.nn.Module


def require_folder(model_path: str, parts: Sequence[str]) -> None:
    """Refuse a folder in which one of ``parts`` is missing or broken.

    Raises:
        ConfigError: listing every missing or broken file.
    """
    problems = folder_problems(model_path, parts)
    if problems:
        raise ConfigError(
            f"model folder {model_path!r} cannot be used: " + "; ".join(problems),
            where="--model-path",
            expected=f"{_LAYOUT}, with {', '.join(part + '/' for part in parts)}",
            next_step="hf download Qwen/Qwen-Image --local-dir DIR, or leave --model-path out for the bundled model",
        )


def load_transformer(model_path: str, *, revision: str | None, dtype: torch.dtype) -> torch.nn.Module:
    """``transformer/`` as a `diffusers.QwenImageTransformer2DModel` on the CPU."""
    from diffusers import QwenImageTransformer2DModel

    return _load(
        QwenImageTransformer2DModel.from_pretrained,
        model_path,
        part="transformer",
        revision=revision,
        torch_dtype=dtype,
        use_safetensors=True,
    )


def load_vae(model_path: str, *, revision: str | None, dtype: torch.dtype) -> torch.nn.Module:
    """``vae/`` as a `diffusers.AutoencoderKLQwenImage` on the CPU."""
    from diffusers import AutoencoderKLQwenImage

    return _load(
        AutoencoderKLQwenImage.from_pretrained,
        model_path,
        part="vae",
        revision=revision,
        torch_dtype=dtype,
        use_safetensors=True,
    )


def load_text_encoder(model_path: str, *, revision: str | None, dtype: torch.dtype) -> torch.nn.Module:
    """``text_encoder/`` as a `transformers.Qwen2_5_VLForConditionalGeneration` on the CPU."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    return _load(
        Qwen2_5_VLForConditionalGeneration.from_pretrained,
        model_path,
        part="text_encoder",
        # Prompts are encoded by the language model alone: its image tower and output head may be absent.
        unread=("visual.", "lm_head."),
        revision=revision,
        dtype=dtype,
        use_safetensors=True,
    )


def load_tokenizer(model_path: str, *, revision: str | None) -> Any:
    """``tokenizer/`` as a `transformers` Qwen2 tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model_path, subfolder="tokenizer", revision=revision or "main", local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise _unfit("tokenizer", model_path, str(error)) from error


def _load(
    from_pretrained: Callable[..., Any], model_path: str, *, part: str, unread: tuple[str, ...] = (), **options: Any
) -> torch.nn.Module:
    """Load one component; refuse tensors that its library would fill in at random or drop with a warning."""
    try:
        # A revision selects nothing inside a local folder; the libraries take it and ignore it.
        options["revision"] = options["revision"] or "main"
        model, report = from_pretrained(
            model_path, subfolder=part, local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise _unfit(part, model_path, str(error)) from error
    faults = []
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(str(name) for name in report.get(f"{kind}_keys") or ())
        names = [name for name in names if not any(prefix in name for prefix in unread)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            faults.append(f"{kind} tensors {', '.join(names[:3])}{more}")
    if faults:
        raise _unfit(part, model_path, "; ".join(faults))
    module: torch.nn.Module = model.eval()
    return module


def _unfit(part: str, model_path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{part}/ of model folder {model_path!r} does not load: {reason}",
        where="--model-path",
        expected=_LAYOUT,
        next_step="compare the folder with the checkpoint it was copied from",
    )
