"""The commands that compute what would be: predict, fit, gpus, plan and simulate. None loads weights."""

from __future__ import annotations

import typer

from nanoinfer.cli.options import Json, command
from nanoinfer.predict.options import FitOptions, PlanOptions, PredictOptions, SimulateOptions
from nanoinfer.show.text import console, emit

commands = typer.Typer()


@command(commands, PredictOptions)
def predict(options: PredictOptions, as_json: Json = False) -> None:
    """Say how fast a model will be on devices that need not be there, why, and what decides how to share it."""
    from nanoinfer.predict import latency, terminal

    record = latency.predict(options)
    emit(record) if as_json else terminal.show_predict(console(), record)


@command(commands, FitOptions)
def fit(options: FitOptions, as_json: Json = False) -> None:
    """Say what fits in a device's memory, where each byte goes, and what would change it. Loads no weights."""
    from nanoinfer.predict import memory, terminal

    record = memory.fit(options)
    emit(record) if as_json else terminal.show_fit(console(), record)


@commands.command()
def gpus(as_json: Json = False) -> None:
    """List the devices whose datasheets are known."""
    from nanoinfer.predict import target, terminal

    record = target.gpus()
    emit(record) if as_json else terminal.show_gpus(console(), record)


@command(commands, PlanOptions)
def plan(options: PlanOptions, as_json: Json = False) -> None:
    """Say how many replicas a number of users needs, what they cost, and what they draw; by simulation."""
    from nanoinfer.predict import serving, terminal

    record = serving.plan(options)
    emit(record) if as_json else terminal.show_plan(console(), record)


@command(commands, SimulateOptions)
def simulate(options: SimulateOptions, as_json: Json = False) -> None:
    """Say what a load would feel on a service that is not there: the real scheduler on a computed clock."""
    from nanoinfer.predict import serving, terminal

    record = serving.simulate_serving(options)
    emit(record) if as_json else terminal.show_simulate(console(), record)
