"""The child process of one part: `python -m tools.gpu.part FUNCTION RECORD MACHINE SCRATCH`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tools.gpu.record import Record


def main(arguments: list[str]) -> int:
    """Run the function ``module:name``. Return 1 if it recorded a failure."""
    function, path, machine, scratch = arguments
    module, _, name = function.partition(":")
    record = Record(Path(path))
    run = getattr(importlib.import_module(module), name)
    run(record, json.loads(Path(machine).read_text()), Path(scratch))
    return int(bool(record.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
