"""Our scorer against transformers' own CLIPModel, processor and tokenizer on the same random weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy
import pytest
import torch
from open_clip.tokenizer import bytes_to_unicode, default_bpe
from PIL import Image
from relax_pickscore.layout import ProcessorConfig
from relax_pickscore.preprocess import clip_pixels
from relax_pickscore.scorer import PickScoreScorer
from relax_pickscore.tokenizer import ClipTokenizer
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from relax_sdk.protocols import RewardBatch

# Three shapes: heads, layers, widths, patch and activation all differ, the last in its epsilon too. In the second,
# floor(28 * (61 / 28)) is 60: a ratio is no safe way to carry a width.
SHAPES = {
    "square": {
        "text": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "vision": {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 3},
        "sizes": {"image_size": 32, "patch_size": 8},
        "both": {"hidden_act": "gelu"},
        "projection_dim": 16,
    },
    "odd_ratio": {
        "text": {"hidden_size": 28, "intermediate_size": 61, "num_hidden_layers": 1, "num_attention_heads": 7},
        "vision": {"hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 1},
        "sizes": {"image_size": 30, "patch_size": 7},
        "both": {"hidden_act": "gelu"},
        "projection_dim": 10,
    },
    "quick_gelu": {
        "text": {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        "vision": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8},
        "sizes": {"image_size": 28, "patch_size": 14},
        "both": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-3},
        "projection_dim": 12,
    },
}
PROMPTS = (
    "a photo of a red circle",
    "",
    "字 à côté d'un 👩‍👩‍👧, naïve “quotes”",
    "a very long prompt about many things, " * 20,
    "A PHOTO of a red circle!",
)


def save_clip(folder: Path, shape: str = "square", **text: object) -> CLIPModel:
    sizes = SHAPES[shape]
    torch.manual_seed(3)
    config = CLIPConfig(
        text_config={**sizes["text"], **sizes["both"], **text},
        vision_config={**sizes["vision"], **sizes["sizes"], **sizes["both"]},
        projection_dim=sizes["projection_dim"],
        logit_scale_init_value=4.6052,
    )
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name != "logit_scale":  # the stock initialisation is too flat to tell mistakes apart
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    """transformers' tokenizer with CLIP's own vocabulary, rebuilt from the merges that open_clip ships."""
    merges = [tuple(line.split()) for line in gzip.decompress(Path(default_bpe()).read_bytes()).decode().split("\n")]
    merges = merges[1 : 49152 - 256 - 2 + 1]
    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges)]
    vocab = {word: index for index, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges)


def random_images(count: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    coarse = torch.rand(count, 3, 6, 5, generator=generator) * 300 - 20
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (smooth + torch.randn(count, 3, height, width, generator=generator) * 8).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_and_scores_equal_transformers(shape: str, tmp_path: Path, tokenizer: CLIPTokenizer) -> None:
    reference = save_clip(tmp_path, shape)
    scorer = PickScoreScorer(model_path=tmp_path, device="cpu", batch_size=2)
    size = SHAPES[shape]["sizes"]["image_size"]
    images = random_images(len(PROMPTS), size, size)
    processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    pixels = processor(list(images), return_tensors="pt")["pixel_values"]
    inputs = tokenizer(list(PROMPTS), padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.inference_mode():
        # transformers 5 answers with an object here, earlier releases with a tensor.
        image_output = reference.get_image_features(pixel_values=pixels)
        text_output = reference.get_text_features(**inputs)
        logits = reference(pixel_values=pixels, **inputs).logits_per_image.diagonal()
    expected_image = torch.nn.functional.normalize(getattr(image_output, "pooler_output", image_output), dim=-1)
    expected_text = torch.nn.functional.normalize(getattr(text_output, "pooler_output", text_output), dim=-1)
    texts, truncated = scorer.embed_texts(PROMPTS)
    torch.testing.assert_close(scorer.embed_images(images), expected_image, rtol=0, atol=1e-5)
    torch.testing.assert_close(texts, expected_text, rtol=0, atol=1e-5)
    assert truncated == [False, False, False, True, False]
    scores = scorer.score(RewardBatch(prompts=PROMPTS, tracks={"image": images}))
    torch.testing.assert_close(torch.tensor(scores.components["pickscore"]), logits / 26, rtol=1e-5, atol=1e-5)
    assert scores.truncated_prompts == 1
    assert logits.std() > 1  # the rows differ, so a wrong pairing could not pass


@pytest.mark.parametrize(
    "text",
    [
        *PROMPTS,
        "  white \u00a0 space\u2028\tand\nlines ",
        "ΟΔΟΣ İstanbul ſtraße",
        "e\u0301 combining, １２ ½ ², zero\u200bwidth",
        "don't I'LL we've &amp; “curly” ÃƒÂ© 'tis",
    ],
)
def test_tokens_equal_transformers(text: str, tokenizer: CLIPTokenizer) -> None:
    expected = tokenizer(text, truncation=True, max_length=77)["input_ids"]
    ids, truncated = ClipTokenizer(context_length=77)([text])
    assert ids[0, : len(expected)].tolist() == expected
    assert ids[0, len(expected) :].eq(0).all()
    assert truncated == [len(tokenizer(text)["input_ids"]) > 77]


@pytest.mark.parametrize(("words", "cut"), [(75, False), (76, True)])
def test_the_context_holds_75_words(words: int, cut: bool) -> None:
    ids, truncated = ClipTokenizer(context_length=77)(["cat " * words])
    assert truncated == [cut]
    assert (ids[0, 76].item(), ids[0].eq(49407).sum().item()) == (49407, 1)


def test_a_control_word_in_a_prompt_is_plain_text() -> None:
    ids, _ = ClipTokenizer(context_length=77)(["a <end_of_text> b <|endoftext|> c"])
    assert ids.eq(49407).sum() == 1


@pytest.mark.parametrize(
    ("height", "width", "pil_share"),
    # Pillow 13 resizes the tall one in the other order of passes.
    [(32, 32, 0.0), (64, 64, 0.01), (48, 100, 0.01), (131, 40, 0.4), (20, 24, 0.02)],
)
def test_pixels_are_the_published_processors(height: int, width: int, pil_share: float) -> None:
    images = random_images(2, height, width)
    arguments = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    published = CLIPImageProcessor(**arguments)
    config = ProcessorConfig(32, 1 / 255, tuple(published.image_mean), tuple(published.image_std))
    ours = clip_pixels(images, config)
    pil_images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    pil_pixels = CLIPImageProcessorPil(**arguments)(pil_images, return_tensors="np")["pixel_values"]
    pil = torch.from_numpy(numpy.array(pil_pixels))
    tensor = published(list(images), return_tensors="pt")["pixel_values"]
    level = 1 / 255 / torch.tensor(config.std)[:, None, None]  # one of 255 levels, after normalisation
    for theirs, share in ((pil, pil_share), (tensor, 0.02)):
        assert ours.shape == theirs.shape == (2, 3, 32, 32)
        levels = ((ours - theirs).abs() / level).round()
        assert levels.max() <= 2
        assert (levels > 0).float().mean() <= share


def test_permuting_rows_permutes_scores_and_batches_do_not_matter(tmp_path: Path) -> None:
    save_clip(tmp_path)
    images = random_images(5, 40, 36)
    one = PickScoreScorer(model_path=tmp_path, batch_size=1)
    many = PickScoreScorer(model_path=tmp_path, batch_size=64)
    scores = many.score(RewardBatch(prompts=PROMPTS, tracks={"image": images})).components["pickscore"]
    assert many.score(RewardBatch(prompts=PROMPTS, tracks={"image": images})).components["pickscore"] == scores
    single = one.score(RewardBatch(prompts=PROMPTS, tracks={"image": images})).components["pickscore"]
    assert single == pytest.approx(scores, abs=1e-5)
    order = [3, 0, 4, 2, 1]
    shuffled = many.score(
        RewardBatch(prompts=tuple(PROMPTS[i] for i in order), tracks={"image": images[torch.tensor(order)]})
    ).components["pickscore"]
    assert shuffled == pytest.approx([scores[i] for i in order], abs=1e-5)
    assert len({round(score, 4) for score in scores}) == len(scores)
    # A shared prompt is embedded once and still belongs to each of its images.
    repeated = many.score(RewardBatch(prompts=(PROMPTS[3],) * 5, tracks={"image": images}))
    assert repeated.components["pickscore"][3] == pytest.approx(scores[3], abs=1e-5)
    assert repeated.truncated_prompts == 1
    mixed = many.score(
        RewardBatch(prompts=(PROMPTS[1], *PROMPTS[1:3], PROMPTS[2], PROMPTS[4]), tracks={"image": images})
    )
    for row in (1, 2, 4):
        assert mixed.components["pickscore"][row] == pytest.approx(scores[row], abs=1e-5)


def test_old_and_half_precision_checkpoints_load(tmp_path: Path) -> None:
    """Buffers and keys that releases of 2023 wrote; weights stored as float16."""
    from safetensors.torch import load_file, save_file

    save_clip(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: value.half() for name, value in load_file(path).items()}
    tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    tensors["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(tensors, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["eos_token_id"] = 2
    raw["text_config_dict"] = {**SHAPES["square"]["text"], **SHAPES["square"]["both"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    reference = CLIPModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    images = random_images(2, 32, 32)
    scorer = PickScoreScorer(model_path=tmp_path)
    pixels = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})(
        list(images), return_tensors="pt"
    )
    with torch.inference_mode():
        expected = reference.get_image_features(**pixels).pooler_output
    expected = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(scorer.embed_images(images), expected, rtol=0, atol=1e-5)


def test_sharded_weights_give_the_same_score(tmp_path: Path) -> None:
    model = save_clip(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    batch = RewardBatch(prompts=PROMPTS, tracks={"image": random_images(5, 32, 32)})
    whole, sharded = (PickScoreScorer(model_path=tmp_path / name).score(batch) for name in ("whole", "sharded"))
    assert whole == sharded
