"""Published models by name, each with its config.json and its published parameter count: ``data/models.toml``."""

from __future__ import annotations

from typing import Any

from nanoinfer.data import read_toml


def _read() -> dict[str, tuple[dict[str, Any], int]]:
    families = read_toml("models")
    usual_columns = families.pop("columns")
    models = {}
    for family, table in families.items():
        columns = table.get("columns", usual_columns) + table.get("more_columns", [])
        context_key = "n_positions" if family == "gpt2" else "max_position_embeddings"
        for name, (parameters, context, values, *more) in table["models"].items():
            config = {"model_type": family, context_key: context, **table.get("common", {})}
            config |= dict(zip(columns, values, strict=True))
            config |= more[0] if more else {}
            models[name] = ({key: None if value == "null" else value for key, value in config.items()}, parameters)
    return models


#: Name to the parsed config.json and the count of parameters.
MODELS = _read()
