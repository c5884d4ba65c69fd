"""``relax-sdk doctor``."""

from __future__ import annotations

import dataclasses

import click

from relax_sdk.cli.app import debug_option
from relax_sdk.cli.output import json_option, print_json, print_table
from relax_sdk.errors import PreflightError
from relax_sdk.preflight import doctor
from relax_sdk.registry import Registry

__all__ = ["doctor_command"]


@click.command(name="doctor")
@debug_option
@json_option
def doctor_command(as_json: bool) -> None:
    """Look at interpreter, packages, SGLang, GPUs, memory, disk and plug-ins.

    Status "fail" keeps training from starting, and ends with exit code 4; "warn" may hinder some runs.
    """
    findings = doctor(Registry.discover())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        rows = [
            [item.name, item.status, item.detail + (f"\n{item.advice}" if item.advice else "")] for item in findings
        ]
        print_table(["what", "status", "found"], rows)
    failed = [f"{item.name}: {item.detail}; {item.advice}" for item in findings if item.status == "fail"]
    if failed:
        raise PreflightError(failed)
