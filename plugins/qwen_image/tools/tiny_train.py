"""How the bundled tiny Qwen-Image is trained: the autoencoder, then the flow-matching transformer.

The transformer is trained on captions with deliberate mistakes, so that it draws crisp shapes but often the wrong
ones: something reinforcement learning can put right, and a person can see. The scorer is trained in `tiny_score`.

Shapes: B pictures, N = 16 latent tokens of C = 64 channels, L caption tokens, D = 64.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from relax_qwen_image.single_frame import single_frame
from tiny_models import TEMPLATE_PREFIX, TEMPLATE_PREFIX_TOKENS, TEMPLATE_SUFFIX, caption_variants
from tiny_world import BACKGROUNDS, COLOURS, COMBINATIONS, FORMS, draw, join, split
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

logger = logging.getLogger("build_tiny_assets")

LATENT_TOKENS = 16
SAMPLE_STEPS = 12


Inputs = tuple[Tensor, ...]


class _Step:
    """One optimizer step as a function of its inputs, replayed from a CUDA graph (one per input shape) on a GPU.

    The models are so small that launching their kernels one by one takes many times as long as running them.
    """

    def __init__(self, parameters: list[nn.Parameter], loss_of: Callable[..., Tensor]) -> None:
        self.parameters = parameters
        self.loss_of = loss_of
        self.graphed = parameters[0].is_cuda
        # A tensor, so that a captured step sees the rate change.
        self.rate = torch.zeros((), device=parameters[0].device)
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=self.rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            capturable=self.graphed,
            foreach=self.graphed,
        )
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, Inputs, Tensor]] = {}

    def plain(self, *inputs: Tensor) -> Tensor:
        """Without a graph."""
        loss = self.loss_of(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Step once; returns the loss as a tensor that the next call may overwrite."""
        if not self.graphed:
            self.optimizer.zero_grad(set_to_none=True)
            return self.plain(*inputs)
        key = tuple(value.shape for value in inputs)
        if key not in self.graphs:
            started = time.monotonic()
            try:
                self.graphs[key] = self._capture(tuple(value.clone() for value in inputs))
            except RuntimeError as error:
                # A library version may do in a step what a capture forbids (a host transfer): slower, not wrong.
                logger.warning("no CUDA graph for %s, stepping without: %s", key, str(error).splitlines()[0])
                torch.cuda.synchronize()
                self.graphed = False
                return self(*inputs)
            logger.info("captured a step for %s in %.1f s", [list(shape) for shape in key], time.monotonic() - started)
        graph, static, loss = self.graphs[key]
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        return loss

    def _capture(self, static: Inputs) -> tuple[torch.cuda.CUDAGraph, Inputs, Tensor]:
        # The optimizer's state and the libraries' workspaces have to exist before the capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.plain(*static)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.plain(*static)
        return graph, static, loss


def optimise(
    name: str,
    parameters: list[nn.Parameter],
    steps: int,
    rate: float,
    inputs_at: Callable[[int], Inputs],
    loss_of: Callable[..., Tensor],
) -> None:
    """AdamW with a short warm-up and a cosine decay to zero.

    `inputs_at(step)` makes the random inputs; `loss_of(*inputs)` must be free of randomness and of host transfers.
    """
    step_once = _Step(parameters, loss_of)
    warmup = max(1, steps // 50)
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        step_once.rate.fill_(rate * min(1.0, (step + 1) / warmup) * decay)
        with torch.no_grad():
            inputs = inputs_at(step)
        loss = step_once(*inputs)
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            logger.info("%s step %d of %d: loss %.5f", name, step, steps, loss.item())


@torch.no_grad()
def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round floating weights to what `dtype` can hold and keep them float32: what is evaluated is what is stored."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype).float())


# ---- latents ---------------------------------------------------------------------------------------------------------


def pack(latents: Tensor) -> Tensor:
    """`[B, 16, 1, 8, 8]` latents to the transformer's `[B, N, C]`, 2x2 patches, channel major as Qwen-Image has it."""
    count, channels, _, height, width = latents.shape
    patches = latents.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(count, (height // 2) * (width // 2), channels * 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack` for square pictures."""
    count, tokens, width = packed.shape
    side = math.isqrt(tokens)
    patches = packed.view(count, side, side, width // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(count, width // 4, 1, side * 2, side * 2)


def _statistics(vae: AutoencoderKLQwenImage, device: torch.device) -> tuple[Tensor, Tensor]:
    mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
    return mean, torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)


def encode(vae: AutoencoderKLQwenImage, pictures: Tensor) -> Tensor:
    """Pictures float32 `[B, 3, 64, 64]` in 0..1 to normalised packed latents `[B, N, C]` (the posterior's mean)."""
    latents = vae.encode(pictures[:, :, None] * 2 - 1).latent_dist.mode()
    mean, std = _statistics(vae, pictures.device)
    return pack((latents - mean) / std)


def decode(vae: AutoencoderKLQwenImage, packed: Tensor) -> Tensor:
    """Normalised packed latents `[B, N, C]` to pictures float32 `[B, 3, 64, 64]` in 0..1, clamped."""
    mean, std = _statistics(vae, packed.device)
    pictures = vae.decode(unpack(packed) * std + mean, return_dict=False)[0][:, :, 0]
    return (pictures / 2 + 0.5).clamp(0, 1)


# ---- autoencoder -----------------------------------------------------------------------------------------------------


def random_combinations(count: int, generator: torch.Generator) -> Tensor:
    """int64 `[count]` on the generator's device."""
    return torch.randint(0, COMBINATIONS, (count,), generator=generator, device=generator.device)


def _scene(count: int, generator: torch.Generator) -> Tensor:
    """Mostly pictures of the world; one in eight blends two of them, so that the autoencoder is not blind to mess."""
    pictures = draw(random_combinations(count, generator), generator)
    blended = count // 8
    share = torch.rand(blended, 1, 1, 1, generator=generator, device=generator.device)
    other = draw(random_combinations(blended, generator), generator)
    pictures[:blended] = pictures[:blended] * share + other * (1 - share)
    return pictures


@torch.no_grad()
def _start_vae(vae: AutoencoderKLQwenImage, generator: torch.Generator) -> None:
    """Initial weights that let a picture through: unit gain for one frame, and little noise on the latents.

    PyTorch's own convolution weights shrink a signal at every layer, and a third of each causal kernel sees a frame;
    what is left of a picture is below the noise, and the decoder learns to ignore it for a thousand steps.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            fan_in = module.in_channels * module.kernel_size[-1] * module.kernel_size[-2]
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator, device=generator.device))
            module.weight.mul_(fan_in**-0.5)
            if module.bias is not None:
                module.bias.zero_()
    vae.quant_conv.weight[16:] *= 0.1
    vae.quant_conv.bias[16:] = -6.0


def train_vae(vae: AutoencoderKLQwenImage, generator: torch.Generator, *, steps: int, batch: int) -> None:
    """Train in place, then round to bfloat16 and set `latents_mean` and `latents_std` to measured values.

    The loss is L1 on pixels and on their differences (crisp outlines), a light pull of the posterior towards the unit
    Gaussian, and decoding from a noisy sample, so that small errors of the transformer do not show.
    """

    def inputs_at(_step: int) -> Inputs:
        noise = torch.randn(2, batch, 16, 1, 8, 8, generator=generator, device=generator.device)
        return _scene(batch, generator) * 2 - 1, noise

    def loss_of(pictures: Tensor, noise: Tensor) -> Tensor:
        # Past the public methods: they clamp, and where they clamp no gradient flows.
        mean, logvar = vae.quant_conv(vae.encoder(pictures[:, :, None])).chunk(2, dim=1)
        logvar = logvar.clamp(-30, 20)
        sample = mean + torch.exp(0.5 * logvar) * noise[0]
        sample = sample + 0.07 * sample.detach().std(dim=(0, 2, 3, 4), keepdim=True) * noise[1]
        error = vae.decoder(vae.post_quant_conv(sample))[:, :, 0] - pictures
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return error.abs().mean() + 0.5 * edges + 3e-4 * divergence

    _start_vae(vae, generator)
    vae.train()
    with single_frame(vae):
        # The temporal convolutions of the resampling layers take no part in a single frame: no gradient reaches them.
        used = [p for name, p in vae.named_parameters() if ".time_conv." not in name]
        optimise("autoencoder", used, steps, 1.5e-3, inputs_at, loss_of)
    vae.eval()
    round_weights(vae, torch.bfloat16)
    measure = torch.arange(COMBINATIONS, device=generator.device).repeat(8)
    with torch.no_grad():
        latents = vae.encode(draw(measure, generator)[:, :, None] * 2 - 1).latent_dist.mode()
    vae.register_to_config(
        latents_mean=[round(x, 5) for x in latents.mean(dim=(0, 2, 3, 4)).tolist()],
        latents_std=[round(x, 5) for x in latents.std(dim=(0, 2, 3, 4)).tolist()],
    )


# ---- text and sampling -----------------------------------------------------------------------------------------------


def caption_texts() -> list[str]:
    """All caption wordings, combination t % 54 at row t."""
    return [text for _, text in caption_variants()]


@torch.no_grad()
def embed_texts(
    texts: list[str], tokenizer: Qwen2Tokenizer, encoder: Qwen2_5_VLForConditionalGeneration, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Caption embeddings as QwenImagePipeline makes them: float32 `[T, L, D]`, bool `[T, L]`, padded on the right."""
    rows = [TEMPLATE_PREFIX + text + TEMPLATE_SUFFIX for text in texts]
    tokens = tokenizer(rows, padding=True, return_tensors="pt").to(device)
    hidden = encoder(**tokens, output_hidden_states=True).hidden_states[-1]
    mask = tokens.attention_mask[:, TEMPLATE_PREFIX_TOKENS:].bool()
    return hidden[:, TEMPLATE_PREFIX_TOKENS:].float() * mask[..., None], mask


def sample_sigmas(scheduler: FlowMatchEulerDiscreteScheduler, steps: int = SAMPLE_STEPS) -> Tensor:
    """The pipeline's sigma schedule for 16 tokens: float32 `[steps + 1]`, from 1 to 0.02, then one terminal 0."""
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (LATENT_TOKENS - config.base_image_seq_len)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas.float().clone()


def velocity(
    transformer: QwenImageTransformer2DModel, latents: Tensor, sigma: Tensor, text: Tensor, mask: Tensor | None
) -> Tensor:
    """Predicted velocity `[B, N, C]` for latents `[B, N, C]` at sigma `[B]`, captions `[B, L, D]` and mask `[B, L]`."""
    return transformer(
        hidden_states=latents,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        timestep=sigma,
        img_shapes=[[(1, 4, 4)]] * latents.shape[0],
        return_dict=False,
    )[0]


@torch.no_grad()
def sample_ode(
    transformer: QwenImageTransformer2DModel, sigmas: Tensor, noise: Tensor, text: Tensor, mask: Tensor | None
) -> Tensor:
    """Integrate from noise `[B, N, C]` to clean packed latents `[B, N, C]` with Euler steps, no guidance."""
    latents = noise
    for now, after in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        sigma = torch.full((latents.shape[0],), now, device=latents.device)
        latents = latents + (after - now) * velocity(transformer, latents, sigma, text, mask)
    return latents


# ---- transformer -----------------------------------------------------------------------------------------------------


def mislabel(combination: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Replace each attribute by another value with this probability, independently: int64 `[B]` to int64 `[B]`."""

    def corrupt(values: Tensor, choices: int) -> Tensor:
        wrong = torch.rand(values.shape, generator=generator, device=values.device) < probability
        shift = torch.randint(1, choices, values.shape, generator=generator, device=values.device)
        return torch.where(wrong, (values + shift) % choices, values)

    colour, form, background = split(combination)
    return join(corrupt(colour, len(COLOURS)), corrupt(form, len(FORMS)), corrupt(background, len(BACKGROUNDS)))


def train_transformer(
    transformer: QwenImageTransformer2DModel,
    latents: Tensor,
    labels: Tensor,
    text: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    *,
    steps: int,
    batch: int,
    label_noise: float,
) -> None:
    """Flow matching in place: velocity target eps - x0 at x = (1 - s) x0 + s eps; then round to bfloat16.

    Args:
        latents: clean packed latents float32 `[P, N, C]` of a pool of pictures.
        labels: what they show, int64 `[P]`.
        text: caption embeddings float32 `[T, L, D]`; T is a multiple of 54 and caption t words combination t % 54.
        mask: bool `[T, L]`.
        label_noise: the probability of each attribute of a caption being wrong.
    """
    device = generator.device
    random = Random(generator.initial_seed())
    shift = math.exp(0.4879)  # the exponent is the schedule's mu at 16 tokens
    wordings = text.shape[0] // COMBINATIONS
    if any(len(set(row)) > 1 for row in mask.sum(dim=1).view(wordings, COMBINATIONS).tolist()):
        raise ValueError("the captions of one wording differ in their number of tokens")
    average = {name: p.detach().clone() for name, p in transformer.named_parameters()}

    lengths = mask.sum(dim=1).tolist()

    def inputs_at(step: int) -> Inputs:
        keep = min(0.999, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(average.values()), list(transformer.parameters()), 1 - keep)
        pick = torch.randint(0, labels.shape[0], (batch,), generator=generator, device=device)
        said = mislabel(labels[pick], label_noise, generator)
        # All captions of a step have one wording and so one length: no padding, no mask.
        first = random.randrange(wordings) * COMBINATIONS
        clean = latents[pick]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # Uniform in the unshifted time, then the schedule's own exponential shift: as dense as the sampler's steps.
        uniform = torch.rand(batch, generator=generator, device=device)
        sigma = shift * uniform / (1 + (shift - 1) * uniform)
        return clean, noise, sigma, text[said + first][:, : lengths[first]]

    def loss_of(clean: Tensor, noise: Tensor, sigma: Tensor, said: Tensor) -> Tensor:
        blend = sigma[:, None, None]
        guess = velocity(transformer, (1 - blend) * clean + blend * noise, sigma, said, None)
        return functional.mse_loss(guess, noise - clean)

    # diffusers keeps these tables on the CPU and copies them at every call, which a captured step may not do.
    tables = transformer.pos_embed
    tables.pos_freqs, tables.neg_freqs = tables.pos_freqs.to(device), tables.neg_freqs.to(device)
    transformer.train()
    optimise("transformer", list(transformer.parameters()), steps, 1.5e-3, inputs_at, loss_of)
    transformer.eval()
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            parameter.copy_(average[name])
    round_weights(transformer, torch.bfloat16)
