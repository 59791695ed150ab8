"""Rows to a file that exists whole or not at all: written beside its place, then renamed.

A row is encoded as it comes. Parquet gathers row groups of about ``GROUP_TOKENS`` tokens, so memory is bounded by the
longest trajectory, not by the run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from opengyre.errors import ConfigError
from opengyre.export.sample import FIELDS, MESSAGE_FIELDS, SCHEMA, SPAN_FIELDS, ExportSample, Field, plain
from opengyre.export.trainers import VERL_FIELDS, SlimeRows, verl_row

GROUP_TOKENS = 2_000_000  # about 20 MB of arrays; row groups are also what readers load at once
FORMATS = ("jsonl", "parquet", "verl", "slime")
SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet", "verl": ".parquet", "slime": ".jsonl"}


class Writer(ABC):
    """Takes samples in order. Ends with ``close``, or with ``abandon`` after an error."""

    @abstractmethod
    def write(self, item: ExportSample) -> None:
        """Add a row."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file."""

    def abandon(self) -> None:  # noqa: B027  most hold nothing
        """Free what is held; the file will be removed."""


class _JsonLines(Writer):
    def __init__(self, file: IO[bytes], *, slime: bool) -> None:
        self._file, self._encoder = file, msgspec.json.Encoder()
        self._slime = SlimeRows() if slime else None

    def write(self, item: ExportSample) -> None:
        row = item.row() if self._slime is None else self._slime(item)
        self._file.write(self._encoder.encode(plain(row)) + b"\n")

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class _Parquet(Writer):
    def __init__(self, file: IO[bytes], *, verl: bool) -> None:
        self._pa, parquet = _pyarrow()
        self._file, self._verl = file, verl
        self._schema = self._arrow(VERL_FIELDS if verl else FIELDS)
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def write(self, item: ExportSample) -> None:
        self._rows.append(verl_row(item) if self._verl else item.row())
        self._tokens += len(item.sample.ids)
        if self._tokens >= GROUP_TOKENS:
            self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def abandon(self) -> None:
        self._writer.close()

    def _flush(self) -> None:
        columns = [self._column(field, [row[field.name] for row in self._rows]) for field in self._schema]
        self._writer.write_table(self._pa.table(columns, schema=self._schema))
        self._rows, self._tokens = [], 0

    def _column(self, field: Any, values: list[Any]) -> Any:
        pa = self._pa
        if not pa.types.is_list(field.type) or not pa.types.is_primitive(field.type.value_type):
            return pa.array(values, field.type)
        # Whole arrays at once: a Python object per token would be ten times the size of the tokens.
        lengths = [0 if value is None else len(value) for value in values]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        dtype = field.type.value_type.to_pandas_dtype()
        flat = np.concatenate([np.empty(0, dtype), *(value for value in values if value is not None)])
        missing = np.isnan(flat) if np.issubdtype(dtype, np.floating) else None
        items = pa.array(flat, field.type.value_type, mask=missing)
        absent = pa.array([value is None for value in values])
        return pa.ListArray.from_arrays(offsets, items, type=field.type, mask=absent)

    def _arrow(self, fields: Iterable[Field]) -> Any:
        pa = self._pa
        function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
        records = {
            "list<span>": pa.list_(pa.struct([(f.name, self._scalar(f.type)) for f in SPAN_FIELDS])),
            "list<message>": pa.list_(
                pa.struct(
                    [(f.name, pa.string()) for f in MESSAGE_FIELDS[:-1]]
                    + [("tool_calls", pa.list_(pa.struct([("type", pa.string()), ("function", function)])))]
                )
            ),
            "extra": pa.struct(
                [(name, pa.string()) for name in ("schema", "sample_id", "execution_id", "task_id", "split", "role")]
                + [(name, pa.int64()) for name in ("min_version", "max_version")]
            ),
        }
        schema = pa.schema([(f.name, records.get(f.type) or self._scalar(f.type)) for f in fields])
        return schema.with_metadata({"opengyre.schema": SCHEMA})

    def _scalar(self, name: str) -> Any:
        pa = self._pa
        kinds = {
            "string": pa.string(),
            "double": pa.float64(),
            "float": pa.float32(),
            "int8": pa.int8(),
            "int32": pa.int32(),
            "int64": pa.int64(),
            "bool": pa.bool_(),
        }
        return pa.list_(kinds[name[5:-1]]) if name.startswith("list<") else kinds[name]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(
            "needs pyarrow", where="--format", right="pip install 'opengyre[export]', or --format jsonl|slime"
        ) from None
    return pyarrow, parquet


@contextlib.contextmanager
def open_writer(path: Path, kind: str) -> Iterator[Writer]:
    """A writer of ``kind`` (one of ``FORMATS``); ``path`` appears when the block ends without an error.

    Raises:
        ConfigError: pyarrow is missing, or the folder of ``path`` is.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder", where="--out", right="a file in a folder that exists")
    if kind in ("parquet", "verl"):
        _pyarrow()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            writer = _Parquet(file, verl=kind == "verl") if "parquet" in SUFFIX[kind] else None
            chosen = writer or _JsonLines(file, slime=kind == "slime")
            try:
                yield chosen
            except BaseException:
                chosen.abandon()
                raise
            chosen.close()
        Path(name).chmod(0o644)  # mkstemp's 0600 would keep it from the trainer's user
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
