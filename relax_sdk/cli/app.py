"""The command tree, imported lazily, and `main`, which turns every outcome into an exit code."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from relax_sdk import __version__
from relax_sdk.errors import EXIT_INTERRUPTED, EXIT_OK, RelaxError, UsageError, nearest_name

__all__ = ["LazyGroup", "cli", "debug_option", "main"]

CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and lists it from a table.

    Args:
        commands_at: name -> (``module:attribute``, one line of help).
    """

    def __init__(self, *args: Any, commands_at: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self._commands_at:
            return None
        module, _, attribute = self._commands_at[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without arguments, print the help page to stderr and end as a usage error."""
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(UsageError.exit_code)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one is nearest."""
        name = args[0]
        if name not in self._commands_at and not name.startswith("-"):
            raise UsageError(
                f"unknown command {name!r}",
                where=ctx.command_path,
                expected="one of " + ", ".join(self._commands_at),
                nearest=nearest_name(name, self._commands_at),
                next_step=f"{ctx.command_path} --help",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, importing nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._commands_at.items()])


class Outcome:
    """What `main` needs to know after click is done."""

    debug = False


def _remember_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Outcome).debug = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


@click.group(
    cls=LazyGroup,
    context_settings=CONTEXT_SETTINGS,
    commands_at={
        "train": ("relax_sdk.cli.run:train_command", "Train a model: FlowGRPO with an installed plug-in."),
        "preflight": ("relax_sdk.cli.run:preflight_command", "Check a configuration as train would, and stop."),
        "status": ("relax_sdk.cli.control:status_command", "Ask a run that is under way how it is."),
        "stop": ("relax_sdk.cli.control:stop_command", "Stop a run after its current rollout."),
        "plugins": ("relax_sdk.cli.plugins:plugins_group", "List installed plug-ins, or show and check one."),
        "config": ("relax_sdk.cli.config:config_group", "Explain where every value comes from."),
        "doctor": ("relax_sdk.cli.doctor:doctor_command", "Look at packages, GPUs, memory, disk and plug-ins."),
    },
)
@click.version_option(__version__, prog_name="relax-sdk", message="%(prog)s %(version)s")
@debug_option
def cli() -> None:
    """Reinforcement-learning post-training of flow-matching image models.

    Start with:  relax-sdk train --plugin qwen_image
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    outcome = Outcome()
    try:
        code = cli.main(arguments, prog_name="relax-sdk", standalone_mode=False, obj=outcome)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _report(_translated(error), debug=outcome.debug)
    except RelaxError as error:
        return _report(error, debug=outcome.debug)
    return code if isinstance(code, int) else EXIT_OK  # --help and its like return a code, commands None


def _report(error: RelaxError, *, debug: bool) -> int:
    if debug:
        click.echo("".join(traceback.format_exception(error)), err=True)
    click.echo(click.style("error: ", fg="red", bold=True) + str(error), err=True)
    return error.exit_code


def _translated(error: click.ClickException) -> UsageError:
    """Put click's own message into the form of every other error."""
    ctx = getattr(error, "ctx", None)
    help_page = f"{ctx.command_path if ctx else 'relax-sdk'} --help"
    nearest = None
    if isinstance(error, click.NoSuchOption):
        what = f"unknown flag {error.option_name!r}"
        flags = [flag for param in ctx.command.params for flag in (*param.opts, *param.secondary_opts)] if ctx else []
        nearest = nearest_name(error.option_name, flags)
    else:
        what = error.format_message()
    return UsageError(what, where=ctx.command_path if ctx else None, nearest=nearest, next_step=help_page)
