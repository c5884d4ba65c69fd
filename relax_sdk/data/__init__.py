"""Prompt files in, batches of prompts out. Loads no torch.

Left out on purpose: converting, deduplicating and splitting public data sets; this room reads what they produce.
"""

from relax_sdk.data.prompts import load_prompts
from relax_sdk.data.sampler import PromptSampler

__all__ = ["PromptSampler", "load_prompts"]
