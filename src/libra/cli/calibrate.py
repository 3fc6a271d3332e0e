"""`libra calibrate`: measures this device."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from libra.cli.errors import bad_input
from libra.cli.output import check_writable


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the calibration as JSON to this file.")],
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu (default: cuda if there is a GPU).")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Known GPU to compare the result with: A100, H100, H200, ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the calibration as JSON.")] = False,
) -> None:
    """Measure this device with PyTorch: matrix products, attention, a training step; for `libra plan --profile FILE`.

    Takes less than a minute. Shows median and spread of repeated runs after a warm-up.

    Exit status: 0 done, 2 bad input.
    """
    from libra.config.extras import install_command
    from libra.config.yaml_file import ConfigError, shown
    from libra.cost.sources.files import save_calibration
    from libra.hardware.cluster import GPUS, nearest_gpu
    from libra.report.tables import calibration_table

    try:
        if gpu is not None and gpu not in GPUS:
            close = nearest_gpu(gpu)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(GPUS)}"
            raise ConfigError(f"--gpu: unknown GPU {shown(gpu)}; {hint}")
        if device not in (None, "cuda", "cpu"):
            raise ConfigError(f"--device is {device}; give cuda or cpu")
        check_writable(output)
        if find_spec("torch") is None:
            raise ConfigError(
                f"PyTorch is not installed: {install_command('gpu')}, or with cpu instead of gpu on a machine "
                f"without a GPU"
            )
        from libra.backends.calibration import calibrate_device

        found = calibrate_device(device)
        save_calibration(output, found)
    except (ConfigError, ValueError, OSError, RuntimeError) as error:
        bad_input(error)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        Console().print(calibration_table(found, None if gpu is None else GPUS[gpu]))
