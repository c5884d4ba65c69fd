"""``relax-sdk status`` and ``relax-sdk stop``: they find a run by its ``control.json`` and ask its controller."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import click

from relax_sdk.cli.app import debug_option
from relax_sdk.cli.output import json_option, print_json, print_table
from relax_sdk.control import (
    CONTROL_FILE,
    TOKEN_VARIABLE,
    Answer,
    ControlAddress,
    ask,
    control_token,
    read_address,
    run_process_is_gone,
)
from relax_sdk.errors import RelaxError, RunError, UsageError
from relax_sdk.metrics import format_evaluation, format_rollout

__all__ = ["status_command", "stop_command"]

_TIMEOUT_S = 10.0
_RUNS = Path("runs")

_F = TypeVar("_F", bound=Callable[..., Any])


class FoundRun(NamedTuple):
    """A run whose controller has just answered."""

    folder: Path
    address: ControlAddress
    token: str | None

    def ask(self, method: Literal["GET", "POST"], path: str) -> Answer:
        """One request; see `_ask`."""
        return _ask(self.folder, self.address, method, path, self.token)


def _run_options(function: _F) -> _F:
    """The argument and the option by which both commands find their run."""
    token_file = click.option(
        "--control-token-file",
        "token_file",
        metavar="PATH",
        type=click.Path(path_type=Path),
        help=f"File that holds the run's token. [default: {TOKEN_VARIABLE}, or no token]",
    )
    run_dir = click.argument("run_dir", required=False, type=click.Path(path_type=Path))
    return run_dir(token_file(function))


@click.command(name="status")
@debug_option
@json_option
@_run_options
def status_command(run_dir: Path | None, token_file: Path | None, as_json: bool) -> None:
    """Ask the run in RUN_DIR how it is: state, rollout, last metrics, and the health of every role.

    Without RUN_DIR, the newest run under ./runs that answers is asked. Ends with exit code 1 when none answers, and
    when the one that does has failed.
    """
    run = _find(run_dir, control_token(token_file=token_file, environ=os.environ))
    status, health = run.ask("GET", "/status").body, run.ask("GET", "/health").body
    if as_json:
        print_json({"url": run.address.url, "status": status, "health": health})
    else:
        _print_status(run, status, health)
    if status.get("state") == "failed":
        raise RunError(str(status.get("error") or "the run failed"), where=str(run.folder))


@click.command(name="stop")
@debug_option
@json_option
@_run_options
def stop_command(run_dir: Path | None, token_file: Path | None, as_json: bool) -> None:
    """Stop the run in RUN_DIR once the rollout under way has been trained on. Returns at once.

    Without RUN_DIR, the newest run under ./runs that answers is stopped. Asking twice is the same as asking once. To
    end a run without waiting, press Ctrl-C where it runs, or send its process SIGTERM.
    """
    run = _find(run_dir, control_token(token_file=token_file, environ=os.environ))
    body = run.ask("POST", "/stop").body
    if as_json:
        print_json({"url": run.address.url, **body})
    else:
        again = " (already asked for)" if body.get("already_requested") else ""
        click.echo(f"{run.folder}: {body.get('message')}{again}")


def _find(run_dir: Path | None, token: str | None) -> FoundRun:
    """The run in a folder, or the newest under ``./runs`` that answers.

    Raises:
        UsageError: no such folder, or the token is missing or wrong.
        RunError: no run answers; files that runs left behind are named.
    """
    if run_dir is not None:
        return _answering(run_dir, _address_in(run_dir), token)
    candidates, problems = _candidates()
    for folder, address in candidates:
        try:
            run = _answering(folder, address, token)
        except RunError as error:
            problems.append(f"{folder}: {error.what}")
            continue
        for problem in problems:
            click.echo(click.style("note: ", fg="yellow", bold=True) + problem, err=True)
        return run
    raise RunError(
        "no run answers\n" + "\n".join(f"  - {problem}" for problem in problems) if problems else "no run answers",
        where=str(_RUNS.absolute()),
        expected=f"a folder with the {CONTROL_FILE} of a run that is under way",
        next_step="relax-sdk status RUN_DIR  (for a run elsewhere)",
    )


def _candidates() -> tuple[list[tuple[Path, ControlAddress]], list[str]]:
    """Folders under ``./runs`` with a ``control.json``, the latest start first; and what is wrong with others."""
    found, problems = [], []
    for path in _RUNS.glob(f"*/{CONTROL_FILE}"):
        try:
            address = read_address(path.parent)
        except RelaxError as error:
            problems.append(f"{path.parent}: {error.what}")
            continue
        if address is not None:  # it may have ended since
            found.append((path.parent, address))
    return sorted(found, key=lambda item: item[1].started, reverse=True), problems


def _address_in(run_dir: Path) -> ControlAddress:
    if not run_dir.is_dir():
        raise UsageError(
            f"no folder {str(run_dir)!r}", where="RUN_DIR", expected="the folder of a run", next_step="ls runs"
        )
    address = read_address(run_dir)
    if address is not None:
        return address
    if (run_dir / "recipe.json").exists():
        raise RunError(
            "no run is under way here: it ended, is still starting, or has --no-control",
            where=str(run_dir),
            expected=f"a {CONTROL_FILE}, which is there while a run answers",
            next_step=f"tail -n 1 {run_dir / 'metrics.jsonl'}",
        )
    raise UsageError(f"{str(run_dir)!r} is not the folder of a run", where="RUN_DIR", next_step="ls runs")


def _answering(folder: Path, address: ControlAddress, token: str | None) -> FoundRun:
    if run_process_is_gone(address):
        raise RunError(
            f"stale {CONTROL_FILE}: its run (process {address.pid}, started {_local(address)}) was killed",
            where=str(folder / CONTROL_FILE),
            next_step=f"rm {folder / CONTROL_FILE}",
        )
    _ask(folder, address, "GET", "/health", token)
    return FoundRun(folder, address, token)


def _ask(folder: Path, address: ControlAddress, method: Literal["GET", "POST"], path: str, token: str | None) -> Answer:
    """One request, with what went wrong as an error.

    Raises:
        RunError: nothing answers, or the controller could not.
        UsageError: the token is missing or wrong.
    """
    try:
        answer = ask(address, method, path, token=token, timeout_s=_TIMEOUT_S)
    except ConnectionError as error:
        raise RunError(
            f"no answer from {address.url}: {error}",
            where=str(folder / CONTROL_FILE),
            expected=f"the run of process {address.pid} on {address.machine}, started {_local(address)}",
            next_step=f"try again, or look for process {address.pid} on {address.machine}",
        ) from error
    if answer.status == 401:
        raise UsageError(
            "the run refuses the token" if token else "the run needs its token",
            where=address.url,
            expected=f"{TOKEN_VARIABLE} or --control-token-file, as given to relax-sdk train",
        )
    if answer.status != 200 and "error" in answer.body and "state" not in answer.body:
        raise RunError(f"{address.url}{path}: {answer.body['error']}", where=str(folder / CONTROL_FILE))
    return answer


def _print_status(run: FoundRun, status: Mapping[str, Any], health: Mapping[str, Any]) -> None:
    total = status["num_rollout"]
    rollout = status["rollout"]
    where = f", {total} rollouts to do" if rollout is None else f", rollout {rollout} of {total}"
    asked = ", stop requested" if status["stop_requested"] and status["state"] != "stopping" else ""
    lines = {"run": f"{run.folder}  ({run.address.url})", "state": f"{status['state']}{where}{asked}"}
    if status["policy_version"] is not None:
        lines["policy"] = f"version {status['policy_version']}"
    lines["started"] = f"{_local(run.address)}  ({_age(run.address.started)} ago)"
    metrics = {name: value for name, value in (status["metrics"] or {}).items() if value is not None}
    step = status["metrics_rollout"] or 0
    last = format_evaluation(step, metrics)
    if any(name.startswith("reward/") for name in metrics):
        last.insert(0, format_rollout(step, metrics, num_rollout=total))
    if last:
        lines["last"] = "\n".join(last)
    if status["error"]:
        lines["error"] = status["error"]
    for name, text in lines.items():
        click.echo(f"{name:<10}" + text.replace("\n", "\n" + 10 * " "))
    click.echo()
    print_table(
        ["role", "state", "last heartbeat", "node", "pid", "problem"],
        [_role_row(name, role) for name, role in ({"driver": health["driver"]} | health["roles"]).items()],
    )


def _role_row(name: str, role: Mapping[str, Any]) -> list[str]:
    age, pid = role["heartbeat_age_s"], role["pid"]
    heartbeat = "-" if age is None else f"{age:.0f} s ago"
    return [name, role["state"], heartbeat, role["node"] or "-", str(pid or "-"), role["problem"] or ""]


def _local(address: ControlAddress) -> str:
    return address.started.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _age(moment: datetime.datetime) -> str:
    seconds = max(int((datetime.datetime.now(datetime.UTC) - moment).total_seconds()), 0)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
