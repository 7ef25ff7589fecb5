"""A command's options are a dataclass: its fields are the command line, the library's argument and the JSON at once.

A field is declared once, ``users: Annotated[int | None, typer.Option(help="...")] = None``, and the command's
function takes the dataclass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def command(
    app: typer.Typer, options: type[Options], name: str | None = None, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function of one ``options`` (and its own options, by keyword) as a command of ``app``.

    Each field of the dataclass becomes an argument or option, as its ``Annotated`` type says; the function's own
    parameters after the first, such as ``as_json``, follow. The function's docstring is the command's help.
    """

    def register(run: Callable[..., None]) -> Callable[..., None]:
        fields = _parameters(options)
        _, *own = _parameters(run)

        def call(**given: Any) -> None:
            run(options(**{f.name: given[f.name] for f in fields}), **{p.name: given[p.name] for p in own})

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([p.replace(kind=keyword) for p in (*fields, *own)])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        call.__name__, call.__doc__ = run.__name__, run.__doc__
        app.command(name, **settings)(call)
        return run

    return register


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters with their annotations read, ``Annotated`` metadata included."""
    hints = get_type_hints(function, include_extras=True)
    return [p.replace(annotation=hints.get(p.name, Any)) for p in inspect.signature(function).parameters.values()]
