"""The published pipeline is the independent statement: same embeddings, same final latents, same picture."""

from __future__ import annotations

import itertools

import pytest
import torch
from relax_qwen_image import text
from relax_qwen_image.geometry import latent_shape, pack_latents, unpack_tokens

from relax_sdk import ConfigError
from relax_sdk.flow import flow_match_sigmas
from relax_sdk.protocols import ReplayBatch

PROMPTS = [
    "a red circle",
    "",
    "a {red} circle on grass, 3 of them, très çà ⚽ 红色",
    "two\n\n  lines <|im_end|> here",
    "<|image_pad|> x",
]


def test_template_is_the_pipelines(pipeline):
    assert pipeline.prompt_template_encode == text.PROMPT_PREFIX + "{}" + text.PROMPT_SUFFIX
    assert pipeline.prompt_template_encode_start_idx == text.PREFIX_TOKENS


def test_embeddings_are_the_pipelines(pipeline, embedded):
    conditions, cut = embedded.encode_prompts(PROMPTS)
    assert cut == [False] * len(PROMPTS)
    with torch.no_grad():
        states, mask = pipeline.encode_prompt(PROMPTS, device="cpu", max_sequence_length=512)
    lengths = mask.sum(dim=1).tolist()
    assert len(set(lengths)) > 1
    for condition, expected, length in zip(conditions, states, lengths, strict=True):
        assert condition["encoder_hidden_states"].shape == (length, 32)
        torch.testing.assert_close(condition["encoder_hidden_states"], expected[:length], atol=1e-5, rtol=1e-5)


def test_embedding_does_not_depend_on_batch_mates(embedded):
    together, _ = embedded.encode_prompts(PROMPTS)
    for prompt, condition in zip(PROMPTS, together, strict=True):
        (alone,), _ = embedded.encode_prompts([prompt])
        assert torch.equal(alone["encoder_hidden_states"], condition["encoder_hidden_states"])


def test_different_prompts_have_different_embeddings(embedded):
    (first, second), _ = embedded.encode_prompts(["a red circle", "a red grass"])
    same_length = min(len(first["encoder_hidden_states"]), len(second["encoder_hidden_states"]))
    difference = first["encoder_hidden_states"][:same_length] - second["encoder_hidden_states"][:same_length]
    assert difference.abs().max() > 0.1


def test_long_prompt_is_cut_as_the_pipeline_cuts_it_and_reported(pipeline, embedded):
    prompt = "a red circle on grass " * 150
    (condition,), cut = embedded.encode_prompts([prompt])
    assert cut == [True]
    assert condition["encoder_hidden_states"].shape[0] == 512
    with torch.no_grad():
        states, _ = pipeline.encode_prompt([prompt], device="cpu", max_sequence_length=512)
    torch.testing.assert_close(condition["encoder_hidden_states"], states[0], atol=1e-5, rtol=1e-5)


def test_prompt_that_just_fits_is_not_reported_as_cut(embedded):
    # A digit is one token; the template's ending takes 5 of the 512.
    fits = "1" * 507
    (condition,), cut = embedded.encode_prompts([fits])
    assert (condition["encoder_hidden_states"].shape[0], cut) == (512, [False])
    (_,), cut = embedded.encode_prompts([fits + "1"])
    assert cut == [True]


def test_tokenizer_that_disagrees_on_the_template_is_refused(pipeline):
    class OneMore:
        def __call__(self, prompt):
            return pipeline.tokenizer("red " + prompt)

    with pytest.raises(ConfigError, match=r"makes 3\d tokens .* drops 34"):
        text.check_tokenizer(OneMore())


def _denoise(adapter, embedded, tokens, condition, scheduler_config, *, height, width, steps):
    sigmas = flow_match_sigmas(steps, tokens.shape[1], scheduler_config)
    for here, after in itertools.pairwise(sigmas):
        batch = ReplayBatch(
            latents=tokens,
            sigmas=torch.full((len(tokens),), here),
            conditions=(condition,) * len(tokens),
            height=height,
            width=width,
        )
        with torch.no_grad():
            velocity = adapter.replay_transition(embedded.transformer, batch)
        assert velocity.dtype == torch.float32
        tokens = tokens + (after - here) * velocity
    return tokens


@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 80), (80, 32)])
def test_our_loop_ends_where_the_pipeline_ends(adapter, pipeline, embedded, scheduler_config, height, width):
    prompt, steps = "a red circle on grass", 5
    noise = torch.randn(2, *latent_shape(height, width), generator=torch.Generator().manual_seed(3))
    tokens = adapter.pack_initial_noise(noise)
    common = {
        "prompt": [prompt] * 2,
        "true_cfg_scale": 1.0,
        "num_inference_steps": steps,
        "height": height,
        "width": width,
        "latents": tokens.clone(),
    }
    expected = pipeline(**common, output_type="latent").images
    assert (expected - tokens).abs().mean() > 0.1

    (condition,), _ = embedded.encode_prompts([prompt])
    final = _denoise(adapter, embedded, tokens, condition, scheduler_config, height=height, width=width, steps=steps)
    torch.testing.assert_close(final, expected, atol=1e-4, rtol=1e-4)

    # The picture, from the very same latents, must be equal to the last bit.
    import numpy

    pictures = pipeline(**common, output_type="np").images
    decoded = embedded.decode_latents(expected, height=height, width=width)
    assert decoded.dtype == torch.uint8
    assert decoded.shape == (2, 3, height, width)
    wanted = torch.from_numpy((pictures * 255).round().astype(numpy.uint8)).permute(0, 3, 1, 2)
    assert torch.equal(decoded, wanted)


def test_packing_is_the_pipelines(pipeline):
    latents = torch.arange(2 * 16 * 4 * 10, dtype=torch.float32).reshape(2, 16, 4, 10)
    tokens = pack_latents(latents)
    assert torch.equal(tokens, pipeline._pack_latents(latents, 2, 16, 4, 10))
    assert torch.equal(unpack_tokens(tokens, height=32, width=80), latents)
    assert torch.equal(unpack_tokens(tokens, height=32, width=80), pipeline._unpack_latents(tokens, 32, 80, 8)[:, :, 0])


@pytest.mark.parametrize("axes", [(), (1,)])
def test_initial_noise_with_a_frame_axis_packs_alike(adapter, axes):
    noise = torch.randn(3, 16, 4, 10)
    assert torch.equal(adapter.pack_initial_noise(noise.reshape(3, *axes, 16, *axes, 4, 10)), pack_latents(noise))


def test_decoding_in_chunks_gives_the_same_pictures(embedded, monkeypatch):
    latents = torch.randn(5, 8, 64, generator=torch.Generator().manual_seed(1))
    whole = embedded.decode_latents(latents, height=32, width=64)
    assert whole.float().std() > 1
    monkeypatch.setattr("relax_qwen_image.embedded.DECODE_PIXELS", 2 * 32 * 64)
    chunked = embedded.decode_latents(latents, height=32, width=64)
    # Convolutions may round differently by batch size: at most one grey level, where a value lies between two.
    assert (whole.int() - chunked.int()).abs().max() <= 1
