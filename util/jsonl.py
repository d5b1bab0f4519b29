"""Files of JSON objects, one per line, such as results.jsonl and log.txt. Each ends in a checksum of its values; lines
without one, such as earlier versions wrote, are taken as they are."""

import fcntl
import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from util.cli import logger

Parsed = TypeVar("Parsed")
SUM = "crc32"


def as_line(record: dict) -> str:
    return json.dumps({**record, SUM: sum_of(record)}) + "\n"


def sum_of(record: dict) -> list[str]:
    """In brackets of its own: a gap from any other value to the middle of it then does not leave a JSON object."""
    return [f"{zlib.crc32(json.dumps(record).encode()):08x}"]


def append_record(path: Path, record: dict) -> None:
    """Append and sync, on a line of its own even after a truncated line or concurrent appends."""
    with open(path, "ab+") as file:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
        whole = file.read(1) in (b"", b"\n")
        file.write((b"" if whole else b"\n") + as_line(record).encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path, parse: Callable[[dict], Parsed]) -> list[Parsed]:
    """What `parse` makes of each line, oldest first; lines that are damaged are named and skipped.

    `parse` refuses a line by whatever error its content leads to.
    """
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    parsed = {number: parsed_or_none(line, parse) for number, line in lines if line.strip()}
    damaged = [str(number) for number, record in parsed.items() if record is None]
    if damaged:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        logger.warning("%s: skipped damaged lines: %s%s", path, ", ".join(damaged[:5]), more)
    return [record for record in parsed.values() if record is not None]


def parsed_or_none(line: bytes, parse: Callable[[dict], Parsed]) -> Parsed | None:
    try:
        record = json.loads(line)
        if SUM in record and record.pop(SUM) != sum_of(record):
            return None
        return parse(record)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
