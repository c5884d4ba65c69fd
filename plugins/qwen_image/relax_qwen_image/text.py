"""Prompts to frozen text conditions, as Qwen-Image was trained to read them.

A prompt is wrapped in a chat template, Qwen2.5-VL's language model reads it, and the hidden states of its last layer,
without those of the template's first 34 tokens, are the condition. Prompts are encoded one at a time: a padded batch
would give the same numbers only up to rounding, and a candidate must not depend on its batch mates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_sdk import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_TEXT_TOKENS", "PREFIX_TOKENS", "PROMPT_PREFIX", "PROMPT_SUFFIX", "check_tokenizer", "encode_prompt"]

PROMPT_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
PROMPT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34
MAX_TEXT_TOKENS = 512


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer with which dropping 34 tokens would not drop exactly the template's prefix.

    Raises:
        ConfigError: with the number of tokens it makes of the prefix.
    """
    count = len(tokenizer(PROMPT_PREFIX).input_ids)
    if count != PREFIX_TOKENS:
        raise ConfigError(
            f"the tokenizer makes {count} tokens of Qwen-Image's prompt template, which drops {PREFIX_TOKENS}",
            where="tokenizer/ of --model-path",
            expected="the tokenizer published with Qwen-Image, or one that agrees with it on the template",
        )


def encode_prompt(prompt: str, *, tokenizer: Any, text_encoder: Any) -> tuple[Tensor, bool]:
    """Encode one prompt.

    Args:
        prompt: any text, also an empty one.
        tokenizer: the checkpoint's tokenizer.
        text_encoder: `Qwen2_5_VLForConditionalGeneration`; only its language model runs.

    Returns:
        Hidden states [L, D] in the encoder's dtype, L at most 512; and whether tokens had to be cut to get there.
    """
    import torch

    ids = tokenizer(PROMPT_PREFIX + prompt + PROMPT_SUFFIX).input_ids
    kept = ids[: PREFIX_TOKENS + MAX_TEXT_TOKENS]
    tokens = torch.tensor([kept], device=text_encoder.device)
    with torch.no_grad():
        # `.model` leaves out the output head, whose logits over the whole vocabulary nobody reads.
        states = text_encoder.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    # The copy lets go of the template's part of the tensor.
    return states.last_hidden_state[0, PREFIX_TOKENS:].clone(), len(kept) < len(ids)
