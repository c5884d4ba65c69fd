"""``relax-sdk train`` and ``relax-sdk preflight``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

from relax_sdk.cli.app import debug_option
from relax_sdk.cli.options import ConfigCommand, config_options, flags_of
from relax_sdk.config import RunConfig, resolve
from relax_sdk.data import load_prompts
from relax_sdk.errors import UnknownNameError
from relax_sdk.preflight import check
from relax_sdk.registry import Registry

__all__ = ["preflight_command", "train_command"]


@click.command(name="train", cls=ConfigCommand)
@debug_option
@config_options
def train_command(**parameters: Any) -> None:
    """Train a model with FlowGRPO.

    \b
    Without further flags the plug-in's bundled demonstration runs:
      relax-sdk train --plugin qwen_image

    Values come from, each over the one before: the defaults below, the plug-in's preset, the --config file, RELAX_*
    variables (--lr is RELAX_LR), flags. `relax-sdk config explain` takes the same flags and says which one won.
    Progress goes to stderr; the run's folder is printed to stdout when it is done.
    """
    registry = Registry.discover()
    config = checked_config(registry, parameters)
    logging.basicConfig(level=config.run.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # Imported here, not above: it loads torch and Ray, which no mistake in the configuration should have to wait for.
    from relax_sdk.cli.progress import terminal_observer
    from relax_sdk.runtime import train

    with terminal_observer() as observer:
        result = train(config, registry=registry, observer=observer)
    click.echo(str(result.run_dir))


@click.command(name="preflight", cls=ConfigCommand)
@debug_option
@config_options
def preflight_command(**parameters: Any) -> None:
    """Check a configuration, its prompt files and its plug-ins, as train does before it starts anything.

    Every violated rule is reported at once (exit code 4).
    """
    checked_config(Registry.discover(), parameters)
    click.echo("preflight passed", err=True)


def checked_config(registry: Registry, parameters: dict[str, Any]) -> RunConfig:
    """Resolve the configuration, read the prompt files, run preflight, import the classes, print the warnings.

    Raises:
        RelaxError: see `resolve`, `load_prompts`, `check` and `Spec.load`.
    """
    # The roles see the working folder, as `python -m` does; the console script must, to judge a class that lies there.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    config_file, flags = flags_of(parameters)
    config = resolve(registry=registry, config_file=config_file, flags=flags)
    rollout = config.rollout
    held_out = rollout.eval_prompt_data
    for path in (rollout.prompt_data, held_out[1] if held_out else None):
        if path is not None:
            load_prompts(path, task=config.model.generation_task)
    for text in check(config, registry):
        click.echo(click.style("warning: ", fg="yellow", bold=True) + text, err=True)
    # Last, because it may load torch: a class that does not import or fit is found here, not after the models loaded.
    registry.engine(rollout.rollout_engine).load()
    scorer = registry.reward(str(config.reward.scorer_path)).load()
    for name in config.reward.component_weights or {}:
        if name not in scorer.components:
            raise UnknownNameError("reward component", name, scorer.components, where="--reward-component-weights")
    return config
