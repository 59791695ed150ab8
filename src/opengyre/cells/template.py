"""The process that cells are forked from: it imports what every cell needs, once, and does nothing else.

    stdin  ◀── ["socket address", "log file"]     one line per cell to start
    stdout ──▶ process id of the forked cell

It runs no tensor operation and touches no device, so a fork of it is as good as a fresh process. Its stdin ends with
the conductor, and then so does it.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    """Import, then fork on demand until stdin ends."""
    import torch
    import transformers  # noqa: F401

    import opengyre.cells.worker
    import opengyre.rollout.torch_engine
    import opengyre.rollout.torch_model
    import opengyre.training.torch_trainer  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended cells leave no zombies; the conductor watches their pidfds
    while line := sys.stdin.buffer.readline():
        address, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_cell(address, log)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _become_cell(address: str, log: str) -> None:
    from opengyre.cells.worker import main as run_cell

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, number)
    try:
        run_cell(address)
    finally:  # whatever happens, a cell never goes on as a template
        import traceback

        if sys.exc_info()[0] is not None:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
