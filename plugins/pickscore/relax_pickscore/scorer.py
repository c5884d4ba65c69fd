"""PickScore v1: how well an image answers its prompt, by a CLIP that was fine-tuned on human choices.

Kirstain et al., "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation" (2023). The network
runs through open_clip, the weights come from a local folder in the published layout; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from relax_pickscore.layout import read_clip_config, read_processor_config, read_tensors
from relax_pickscore.preprocess import clip_pixels
from relax_sdk import ConfigError, RewardError
from relax_sdk.protocols import RewardBatch, RewardScores

__all__ = ["SCORE_DIVISOR", "PickScoreScorer"]

# A published PickScore is logit_scale.exp() * cosine, about 17 to 24 for v1 (logit_scale.exp() is 100). The FlowGRPO
# reference scorer (flow_grpo/pickscore_scorer.py) divides by 26 to bring it near 0..1, and reward figures in the
# literature and in the recipes are on that scale: 22.3 reads 0.858.
SCORE_DIVISOR = 26.0


class PickScoreScorer:
    """Scores ``image`` tracks against their prompts: ``logit_scale.exp() * cos(text, image) / 26``.

    Always float32, because differences within a group are of the order of 0.01. (On a GPU torch's TF32 settings apply;
    by default they touch only the patch convolution.) A row's score does not depend on the other rows beyond float
    rounding, and a repeated call repeats it.

    Args:
        model_path: a folder with ``config.json``, ``model.safetensors`` (or its sharded index) and, if at hand,
            ``preprocessor_config.json``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:<n>"``.
        batch_size: images (and prompts) per forward.

    Raises:
        ConfigError: the folder is not a CLIP in the published layout, or the device is not there.
    """

    components: tuple[str, ...] = ("pickscore",)
    required_tracks: tuple[str, ...] = ("image",)

    def __init__(self, *, model_path: str | Path | None, device: str = "cpu", batch_size: int = 32) -> None:
        if model_path is None:
            raise ConfigError(
                "PickScore needs its model",
                where="--reward-model-path",
                expected="a folder in the layout of yuvalkirstain/PickScore_v1",
            )
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}", where="PickScoreScorer", expected="at least 1")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device is {device!r} but no CUDA device is visible",
                where="PickScoreScorer",
                next_step="score on the CPU: --reward-runtime cpu",
            )
        # They import open_clip, which takes seconds that a driver, which only looks at the class, need not wait.
        from relax_pickscore.convert import load_clip
        from relax_pickscore.tokenizer import ClipTokenizer

        folder = Path(model_path).expanduser()
        config = read_clip_config(folder)
        self._processor = read_processor_config(folder, image_size=config.image_size)
        self._tokenizer = ClipTokenizer(context_length=config.context_length)
        self._model = load_clip(read_tensors(folder), config, where=str(folder)).to(device)
        self._device = torch.device(device)
        self._batch_size = batch_size
        # While the scorer is off its device: its frozen weights, in host memory. Copied there once and kept.
        self._host: dict[str, Tensor] = {}
        self._released = False

    def release(self) -> None:
        """Leave the device; the weights stay in (pinned) host memory."""
        if self._released:
            return
        tensors = self._tensors()
        if not self._host:
            self._host = {name: _host_copy(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.data = self._host[name]
        self._released = True
        if self._device.type == "cuda":
            # What the allocator keeps for later is of no use to the process that trains.
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Return to the device."""
        if not self._released:
            return
        for name, tensor in self._tensors().items():
            tensor.data = self._host[name].to(self._device, non_blocking=True)
        self._released = False

    @torch.inference_mode()
    def score(self, batch: RewardBatch) -> RewardScores:
        """Score every row.

        Returns:
            ``pickscore`` for each row, in order; ``truncated_prompts`` counts the distinct prompts of the batch that
            were cut to the context length (77 tokens for v1).

        Raises:
            RewardError: the batch has no ``image`` track, or the scorer is off its device.
        """
        if self._released:
            raise RewardError("asked for scores while off its device", where="reward scorer pickscore")
        images = batch.tracks.get("image")
        if images is None:
            raise RewardError(
                f"the batch has no 'image' track; it has {sorted(batch.tracks)}", where="reward scorer pickscore"
            )
        if not batch.prompts:
            return RewardScores(components={"pickscore": ()}, truncated_prompts=0)
        # The candidates of a group share their prompt: each distinct one is embedded once.
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(batch.prompts))}
        texts, truncated = self.embed_texts(list(distinct))
        text_rows = torch.tensor([distinct[prompt] for prompt in batch.prompts], dtype=torch.int64)
        cosines = (texts[text_rows.to(self._device)] * self.embed_images(images)).sum(dim=-1)
        scores = self._model.logit_scale.exp() * cosines / SCORE_DIVISOR
        return RewardScores(components={"pickscore": tuple(scores.tolist())}, truncated_prompts=sum(truncated))

    @torch.inference_mode()
    def embed_images(self, images: Tensor) -> Tensor:
        """Unit embeddings [B, E] float32 of images [B, 3, H, W] uint8."""
        rows = [
            self._model.encode_image(clip_pixels(chunk.to(self._device), self._processor))
            for chunk in torch.split(images, self._batch_size)
        ]
        return functional.normalize(torch.cat(rows), dim=-1)

    @torch.inference_mode()
    def embed_texts(self, prompts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Unit embeddings [B, E] float32 of prompts, and for each whether it was cut to the context length."""
        ids, truncated = self._tokenizer(prompts)
        rows = [self._model.encode_text(chunk.to(self._device)) for chunk in torch.split(ids, self._batch_size)]
        return functional.normalize(torch.cat(rows), dim=-1), truncated

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy that the device can read directly; on the CPU the tensor itself, which is where it belongs."""
    return tensor.detach().cpu().pin_memory() if tensor.device.type == "cuda" else tensor.detach()
