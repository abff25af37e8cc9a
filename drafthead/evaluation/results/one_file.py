"""All results of an evaluation in one Parquet file, from which the report can be made again on any machine.

Rows of requests, runs and offline acceptance stand one after the other, told apart by the column `table`; a column that
a table does not have is null in its rows. The recipe and the manifests of both measurements travel in the metadata.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from drafthead.config import Recipe, load_recipe
from drafthead.files import atomic_path

NAME = "results.parquet"
_KEY = b"drafthead"
_TABLES = ("acceptance", "requests", "runs")


class Results(NamedTuple):
    """What one file holds: rows as the measurements wrote them, and where they come from."""

    recipe: Recipe
    manifests: dict[str, dict[str, Any]]
    acceptance: pd.DataFrame
    requests: pd.DataFrame
    runs: pd.DataFrame


def write_one_file(path: Path, results: Results) -> None:
    """Write everything, whole or not at all."""
    tables = []
    for name in _TABLES:
        table = pa.Table.from_pandas(getattr(results, name), preserve_index=False).replace_schema_metadata(None)
        tables.append(table.append_column("table", pa.array([name] * len(table))))
    about = {"recipe": results.recipe.model_dump(mode="json"), "manifests": results.manifests}
    joined = pa.concat_tables(tables, promote_options="permissive")
    joined = joined.replace_schema_metadata({_KEY: json.dumps(about).encode()})
    with atomic_path(path) as temporary:
        pq.write_table(joined, temporary, compression="zstd")


def read_one_file(path: Path, overrides: Sequence[str] = ()) -> Results:
    """Read what `write_one_file` wrote.

    Args:
        path: of the file.
        overrides: dotted, on the recipe in it, such as eval.price_per_gpu_hour=5.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another kind of Parquet file, or an override is wrong.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; eval/report.py RECIPE writes {NAME} into results/NAME")
    joined = pq.read_table(path)
    about = (joined.schema.metadata or {}).get(_KEY)
    if about is None:
        raise ValueError(f"{path} holds no results of this project; give the {NAME} that eval/report.py wrote")
    found = json.loads(about)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(found["recipe"], file)
        file.flush()
        recipe = load_recipe(file.name, overrides)
    return Results(recipe, found["manifests"], *(_rows(joined, name) for name in _TABLES))


def _rows(joined: pa.Table, name: str) -> pd.DataFrame:
    rows = joined.filter(pc.equal(joined["table"], name)).drop_columns("table")
    absent = [column for column in rows.column_names if rows[column].null_count == len(rows)]
    return rows.drop_columns(absent).to_pandas()
