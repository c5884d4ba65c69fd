"""Rules about the task, the model family and its folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from relax_sdk.errors import nearest_name
from relax_sdk.preflight.situation import Rule, Situation, call_adapter

__all__ = ["RULES", "WARNINGS"]

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"


def task_is_known(situation: Situation) -> Iterator[str]:
    """The task vocabulary is what registered adapters can replay; the chosen one must be among them."""
    task = situation.config.model.generation_task
    supported = tuple(getattr(situation.adapter, "supported_tasks", ()))
    known = tuple(dict.fromkeys((*situation.registry.tasks(), *supported)))
    if task not in known:
        nearest = nearest_name(task, known)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        yield f"{situation.given('model.generation_task')}: expected one of {', '.join(known)}{hint}"
    elif situation.model is not None and task not in supported:
        yield (
            f"{situation.given('model.generation_task')}: the adapter {situation.model.name!r} replays "
            f"{', '.join(supported) or 'no task'}"
        )


def model_is_chosen(situation: Situation) -> Iterator[str]:
    """An adapter and a model folder."""
    if situation.model is None:
        names = [spec.name for record in situation.registry.plugins() for spec in record.models]
        installed = f"installed: {', '.join(names)}" if names else "no plug-in with a model is installed"
        yield f"no model is chosen: give --plugin NAME, or --model-adapter-path package.module:Class ({installed})"
    if situation.config.model.model_path is None:
        yield "no model folder: give --model-path, or a --preset that has one"


def model_folder_is_complete(situation: Situation) -> Iterator[str]:
    """The folder exists and holds what the trainer and the driver read; the adapter may check more."""
    text = situation.config.model.model_path
    if text is None:
        return
    path, given = Path(text), situation.given("model.model_path")
    if not path.is_dir():
        yield f"{given}: " + ("this is a file, not a folder" if path.is_file() else "no such folder") + _hub_hint(text)
    elif situation.adapter is not None and hasattr(situation.adapter, "check_model_path"):
        for problem in call_adapter(situation, "check_model_path", str(path)):
            yield f"{given}: {problem}"
    else:
        part = situation.config.fsdp.trainable_attr
        if not (path / part).is_dir():
            yield f"{given}: it has no folder {part}/"
        if not (path / SCHEDULER_CONFIG).is_file():
            yield f"{given}: it has no {SCHEDULER_CONFIG}"


def _hub_hint(text: str) -> str:
    """A path that ends like ``owner/name`` was perhaps meant as a repository, which is never fetched on its own."""
    tail = "/".join(Path(text).parts[-2:])
    if re.fullmatch(r"[A-Z][\w.-]*/[\w.-]+", tail):
        return f" (models are not downloaded; for a repository: hf download {tail} --local-dir <folder>)"
    return ""


def adapter_serves_the_engine(situation: Situation) -> Iterator[str]:
    """An engine may need more of the adapter than training does."""
    missing = [] if situation.adapter is None else situation.engine.missing_from(situation.adapter)
    if missing:
        yield (
            f"{situation.given('rollout.rollout_engine')}: the adapter {type(situation.adapter).__name__} cannot serve "
            f"it, it lacks {', '.join(missing)} ({situation.engine.adapter_protocol})"
        )


def engine_is_installed(situation: Situation) -> Iterator[str]:
    """The engine's own checks of this machine."""
    for text in situation.engine.preflight_problems():
        yield f"{situation.given('rollout.rollout_engine')}: {text}"


def engine_takes_arguments(situation: Situation) -> Iterator[str]:
    """Arguments for a server that the engine does not have would be lost in silence."""
    arguments, given = situation.config.rollout.rollout_engine_args, situation.given("rollout.rollout_engine_args")
    if arguments is None:
        return
    try:
        shlex.split(arguments)
    except ValueError as error:
        yield f"{given}: it cannot be split into arguments ({error})"
        return
    if not situation.engine.takes_arguments:
        yield f"{given}: the engine {situation.engine.name!r} has no server of its own; leave it out"


def revision_selects_nothing(situation: Situation) -> Iterator[str]:
    """A folder has no revisions."""
    model = situation.config.model
    if model.model_revision is not None and model.model_path is not None and Path(model.model_path).is_dir():
        yield (
            f"{situation.given('model.model_revision')}: it selects nothing, because --model-path is a local folder; "
            "what lies there is what is trained"
        )


RULES: tuple[Rule, ...] = (
    task_is_known,
    model_is_chosen,
    model_folder_is_complete,
    adapter_serves_the_engine,
    engine_is_installed,
    engine_takes_arguments,
)
WARNINGS: tuple[Rule, ...] = (revision_selects_nothing,)
