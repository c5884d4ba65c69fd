"""Build the bundled tiny models and prompt sets: a Qwen-Image pipeline and a PickScore, trained from nothing.

    python plugins/qwen_image/tools/build_tiny_assets.py --device cuda

(with the plug-in installed) writes a tiny Qwen-Image (diffusers layout), the prompt sets and a tiny PickScore
(Hugging Face CLIP layout) into the two plug-ins, prints held-out figures of quality and writes them into the assets'
README files. Minutes on one GPU.
The pictures, the captions and every weight come from this folder alone; nothing is downloaded.

The base model is wrong on purpose: it learns from captions with mistakes (`--label-noise`), so that post-training has
something to put right. `--effort 0.002` runs every line in a minute on a CPU and gives useless models.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import open_clip
import tiny_models
import tiny_score
import tiny_train
import tiny_world
import torch
from diffusers import AutoencoderKLQwenImage, ModelMixin, QwenImagePipeline
from PIL import Image
from relax_qwen_image.single_frame import single_frame
from torch import Tensor
from transformers import CLIPModel, PreTrainedModel

logger = logging.getLogger("build_tiny_assets")
PLUGINS = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is trained; every count is multiplied by `--effort`."""

    vae_steps: int = 3000
    vae_batch: int = 32
    latent_pool: int = 16_200
    transformer_steps: int = 14_000
    transformer_batch: int = 256
    judged_pool: int = 40_000
    clip_steps: int = 4000
    clip_batch: int = 256

    def scaled(self, factor: float) -> Effort:
        """The same with all counts times `factor`, but never below what lets the code run."""
        return Effort(**{name: max(8, round(value * factor)) for name, value in vars(self).items()})


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out-qwen", type=Path, default=PLUGINS / "qwen_image/relax_qwen_image/assets")
    parser.add_argument("--out-pickscore", type=Path, default=PLUGINS / "pickscore/relax_pickscore/assets")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument(
        "--label-noise", type=float, default=0.2, help="chance of each attribute of a caption being wrong"
    )
    parser.add_argument("--vae-width", type=int, default=8, help="base_dim of the autoencoder")
    parser.add_argument("--effort", type=float, default=1.0, help="multiplies all step, batch and pool counts")
    parser.add_argument("--work", type=Path, help="keep each trained part here and, if it is there already, load it")
    parser.add_argument("--sheet", type=Path, help="also write a picture of base model samples, one row per prompt")
    return parser.parse_args()


def set_determinism(seed: int) -> None:
    """Seed the initial weights; allow the fast matrix formats, whose rounding differs between machines."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def stage(folder: Path | None, name: str, model: ModelMixin | PreTrainedModel, train: Callable[[], None]) -> float:
    """Train a model in place, or load what an earlier run with the same `--work` folder trained.

    The measured statistics in an autoencoder's configuration are kept with its weights.

    Returns:
        The seconds that training took, also when it was loaded.
    """
    file = folder / f"{name}.pt" if folder is not None else None
    started = time.monotonic()
    if file is not None and file.exists():
        saved = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["weights"])
        if isinstance(model, AutoencoderKLQwenImage):
            model.register_to_config(**saved["statistics"])
        logger.info("%s: loaded from %s", name, file)
        return float(saved["seconds"])
    train()
    seconds = time.monotonic() - started
    logger.info("%s: trained in %.0f s", name, seconds)
    if file is not None:
        statistics = {}
        if isinstance(model, AutoencoderKLQwenImage):
            statistics = {key: list(model.config[key]) for key in ("latents_mean", "latents_std")}
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        torch.save({"weights": model.state_dict(), "statistics": statistics, "seconds": seconds}, part)
        part.replace(file)
    return seconds


def build_pipeline(
    arguments: argparse.Namespace, effort: Effort, device: torch.device
) -> tuple[QwenImagePipeline, float]:
    """Train the autoencoder and the transformer; the text encoder keeps its random weights, which tell words apart.

    Returns:
        The pipeline and the seconds of training.
    """
    generator = torch.Generator(device)
    vae = tiny_models.make_vae(arguments.vae_width).to(device)
    tokenizer = tiny_models.make_tokenizer()
    encoder = tiny_models.make_text_encoder(tokenizer)
    tiny_train.round_weights(encoder, torch.bfloat16)
    encoder.to(device)
    transformer = tiny_models.make_transformer().to(device)

    def autoencoder() -> None:
        generator.manual_seed(arguments.seed)
        tiny_train.train_vae(vae, generator, steps=effort.vae_steps, batch=effort.vae_batch)

    def flow() -> None:
        generator.manual_seed(arguments.seed + 1)
        text, mask = tiny_train.embed_texts(tiny_train.caption_texts(), tokenizer, encoder, device)
        labels = torch.arange(max(54, effort.latent_pool), device=device) % tiny_world.COMBINATIONS
        with torch.no_grad(), single_frame(vae):
            pool = [tiny_train.encode(vae, tiny_world.draw(part, generator)) for part in labels.split(540)]
        tiny_train.train_transformer(
            transformer,
            torch.cat(pool),
            labels,
            text,
            mask,
            generator,
            steps=effort.transformer_steps,
            batch=effort.transformer_batch,
            label_noise=arguments.label_noise,
        )

    seconds = stage(arguments.work, "autoencoder", vae, autoencoder)
    seconds += stage(arguments.work, "transformer", transformer, flow)
    pipeline = QwenImagePipeline(
        scheduler=tiny_models.make_scheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    return pipeline, seconds


def caption_tokens(device: torch.device) -> Tensor:
    """CLIP tokens of all captions, int64 `[T, L]`: without the padding, which a causal text tower never looks at."""
    tokens = open_clip.tokenizer.SimpleTokenizer()(tiny_train.caption_texts())
    return tokens[:, : int(tokens.argmax(dim=1).max()) + 1].to(device)


def build_clip(
    vae: AutoencoderKLQwenImage, tokens: Tensor, arguments: argparse.Namespace, effort: Effort, device: torch.device
) -> tuple[CLIPModel, float]:
    """Train the scorer on good and bad pictures; returns it and the seconds of training."""
    generator = torch.Generator(device)
    model = tiny_models.make_clip().to(device)

    def scorer() -> None:
        generator.manual_seed(arguments.seed + 2)
        with single_frame(vae):
            data = tiny_score.judged_pictures(vae, effort.judged_pool, generator)
        tiny_score.train_clip(model, data, tokens, generator, steps=effort.clip_steps, batch=effort.clip_batch)

    seconds = stage(arguments.work, "scorer", model, scorer)
    return model.eval(), seconds


def _share(condition: Tensor) -> float:
    return round(condition.float().mean().item(), 4)


@torch.no_grad()
def measure(
    pipeline: QwenImagePipeline, clip: CLIPModel, tokens: Tensor, device: torch.device, sheet: Path | None
) -> dict[str, float]:
    """Held-out figures: fresh pictures, and four samples for every evaluation prompt from fixed noise."""
    generator = torch.Generator(device).manual_seed(987_654_321)
    figures: dict[str, float] = {}
    vae = pipeline.vae

    truth = torch.arange(tiny_world.COMBINATIONS, device=device).repeat(8)
    clean = tiny_world.draw(truth, generator)
    rebuilt = torch.cat([tiny_train.decode(vae, tiny_train.encode(vae, part)) for part in clean.split(108)])
    figures["autoencoder_l1"] = round((clean - rebuilt).abs().mean().item(), 5)
    figures["pixel_check_right_on_clean"] = _share(tiny_world.read_pictures(clean).combination == truth)
    figures["pixel_check_right_on_rebuilt"] = _share(tiny_world.read_pictures(rebuilt).combination == truth)

    classes = tokens[: tiny_world.COMBINATIONS]
    judged = tiny_score.scores(clip, clean, classes)
    figures["clip_accuracy_clean"] = _share(judged.argmax(dim=1) == truth)
    figures["clip_accuracy_rebuilt"] = _share(tiny_score.scores(clip, rebuilt, classes).argmax(dim=1) == truth)
    every = torch.arange(tiny_world.COMBINATIONS, device=device)
    parts = zip(tiny_world.split(truth), tiny_world.split(every), strict=True)
    wrong = sum((a[:, None] != b[None]).long() for a, b in parts)
    for count in range(4):
        figures[f"score_{count}_wrong"] = round(judged[wrong == count].mean().item(), 4)
    hidden = tiny_score.scores(clip, rebuilt, tokens[tiny_world.COMBINATIONS * 7 :][: tiny_world.COMBINATIONS])
    figures["clip_accuracy_longest_wording"] = _share(hidden.argmax(dim=1) == truth)
    mess = {
        "noise": torch.rand(clean.shape, generator=generator, device=device),
        "blank": clean[:, :, :1, :1].expand_as(clean),
        "average_of_two": (clean + clean[torch.randperm(len(clean), generator=generator, device=device)]) / 2,
    }
    for name, pictures in mess.items():
        matched = tiny_score.scores(clip, pictures, classes).gather(1, truth[:, None])
        figures[f"score_{name}"] = round(matched.mean().item(), 4)

    prompts = [str(row["prompt"]) for row in tiny_world.prompt_rows()[1]]
    wordings = {text: index for index, text in enumerate(tiny_train.caption_texts())}
    rows = torch.tensor([wordings[prompt] for prompt in prompts], device=device).repeat_interleave(4)
    wanted = rows % tiny_world.COMBINATIONS
    text, mask = tiny_train.embed_texts(prompts, pipeline.tokenizer, pipeline.text_encoder, device)
    text, mask = text.repeat_interleave(4, dim=0), mask.repeat_interleave(4, dim=0)
    shape = (len(rows), tiny_train.LATENT_TOKENS, 64)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device)
    sigmas = tiny_train.sample_sigmas(pipeline.scheduler)
    latents = tiny_train.sample_ode(pipeline.transformer, sigmas, noise, text, mask)
    drawn = torch.cat([tiny_train.decode(vae, part) for part in latents.split(144)])
    reading = tiny_world.read_pictures(drawn)
    read = reading.combination
    judged = tiny_score.scores(clip, drawn, classes)
    figures["drawn_clean"] = _share(read >= 0)
    figures["drawn_edge_width_pixels"] = round(reading.edge.median().item(), 3)
    figures["drawn_right_by_pixels"] = _share(read == wanted)
    figures["drawn_right_by_clip"] = _share(judged.argmax(dim=1) == wanted)
    figures["clip_agrees_with_pixels_where_clean"] = _share((judged.argmax(dim=1) == read)[read >= 0])
    own = tiny_score.scores(clip, drawn, tokens)[torch.arange(len(rows), device=device), rows]
    figures["drawn_score_mean"] = round(own.mean().item(), 4)
    spread = own.view(-1, 4).std(dim=1)
    figures["drawn_score_spread_within_prompt"] = round(spread.mean().item(), 4)
    if sheet is not None:
        save_sheet(drawn[: 4 * 54], sheet)
    return figures


def save_sheet(pictures: Tensor, path: Path, columns: int = 24) -> None:
    """Tile pictures float32 `[B, 3, 64, 64]`, B a multiple of `columns`, into one PNG."""
    rows = pictures.shape[0] // columns
    tiled = pictures[: rows * columns].view(rows, columns, 3, 64, 64).permute(0, 3, 1, 4, 2).reshape(rows * 64, -1, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((tiled * 255).round().byte().cpu().numpy()).save(path)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


QWEN_README = """# Bundled assets: a tiny Qwen-Image and its prompts

`tiny/` is a Qwen-Image pipeline of {qwen_mb:.1f} MB, trained from nothing by
`plugins/qwen_image/tools/build_tiny_assets.py` (command: `{command}`).
It draws 64x64 pictures of one shape: six colours, three forms, three backgrounds. It is wrong on purpose: each
attribute of its training captions was replaced with probability {noise}, so that it draws clean shapes, often not the
ones asked for, and post-training has something to put right. The text encoder has random weights: it tells words apart
and knows nothing else. Weights hold bfloat16 values. It is a test object for the training loop and says nothing about
image quality at full size.

`prompts/train.jsonl` has {train} prompts: six phrasings of 48 combinations. `prompts/eval.jsonl` has {evaluation}:
every combination in a phrasing that no training prompt uses, and the six combinations that no training prompt names in
three more phrasings.

## Measured

{machine}, {date}; {minutes:.1f} minutes of training. All figures are on pictures and noise not used in training, after
the weights were rounded; drawn: 12 Euler steps without guidance, {evaluation} evaluation prompts, four seeds each.
`pixels` is the check without a network in `tiny_world.read_pictures`.

{table}
"""
PICKSCORE_README = """# Bundled assets: a tiny PickScore

`tiny/` has the layout of `yuvalkirstain/PickScore_v1` (a Hugging Face CLIP of ViT-H's architecture, CLIP's own BPE, no
tokenizer files) in {clip_mb:.1f} MB, trained from nothing by `plugins/qwen_image/tools/build_tiny_assets.py`. It judges
the 64x64 pictures of that script's world only: a clean picture of what the caption says scores about 0.88 (after the
division by 26), 0.22 less for every wrong attribute, and mess scores low. Of other pictures or captions it knows
nothing: token rows that no caption uses are zero.

## Measured

{machine}, {date}. `score_N_wrong`: mean score of clean pictures for captions with N of three attributes wrong.

{table}
"""


def write_readmes(arguments: argparse.Namespace, figures: dict[str, float], machine: str, minutes: float) -> None:
    """Write both README files from the measured figures."""
    table = "| figure | value |\n| --- | --- |\n" + "\n".join(f"| {k} | {v} |" for k, v in figures.items())
    train, evaluation = tiny_world.prompt_rows()
    command = f"build_tiny_assets.py --device {arguments.device} --seed {arguments.seed}"
    command += f" --label-noise {arguments.label_noise} --vae-width {arguments.vae_width} --effort {arguments.effort}"
    values = {
        "command": command,
        "noise": arguments.label_noise,
        "qwen_mb": folder_bytes(arguments.out_qwen / "tiny") / 1e6,
        "clip_mb": folder_bytes(arguments.out_pickscore / "tiny") / 1e6,
        "train": len(train),
        "evaluation": len(evaluation),
        "machine": machine,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "minutes": minutes,
        "table": table,
    }
    tiny_models.write_text(arguments.out_qwen / "README.md", QWEN_README.format(**values))
    tiny_models.write_text(arguments.out_pickscore / "README.md", PICKSCORE_README.format(**values))


def main() -> None:
    """Build, measure, write."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    device = torch.device(arguments.device)
    effort = Effort().scaled(arguments.effort)
    set_determinism(arguments.seed)
    tokens = caption_tokens(device)

    pipeline, seconds = build_pipeline(arguments, effort, device)
    clip, more = build_clip(pipeline.vae, tokens, arguments, effort, device)
    figures = measure(pipeline, clip, tokens, device, arguments.sheet)

    train, evaluation = tiny_world.prompt_rows()
    tiny_models.write_jsonl(arguments.out_qwen / "prompts/train.jsonl", train)
    tiny_models.write_jsonl(arguments.out_qwen / "prompts/eval.jsonl", evaluation)
    pipeline.to("cpu")
    tiny_models.save_qwen_image(pipeline, arguments.out_qwen / "tiny")
    tiny_models.save_clip(clip.cpu().half(), arguments.out_pickscore / "tiny")
    figures["qwen_image_bytes"] = folder_bytes(arguments.out_qwen / "tiny")
    figures["pickscore_bytes"] = folder_bytes(arguments.out_pickscore / "tiny")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"
    machine += f", torch {torch.__version__.split('+')[0]}"
    write_readmes(arguments, figures, machine, (seconds + more) / 60)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
