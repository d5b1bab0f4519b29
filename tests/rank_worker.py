"""One of several processes that run main programs together, one after the other: see processes.Ranks.

Standard input has a JSON line for each program; standard output answers each with [exit code, output, errors].
"""

import importlib
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

import torch

from util.program import run

torch.set_num_threads(1)
for request in sys.stdin:
    program, port, flags = json.loads(request)
    os.environ["MASTER_PORT"] = port
    sys.argv = [f"{program}.py", *flags]
    module, code, out, err = importlib.import_module(program), 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            run(module.main, module.get_args_parser())
        except SystemExit as stop:
            code = stop.code
    sys.stdout.write(json.dumps([code, out.getvalue(), err.getvalue()]) + "\n")
    sys.stdout.flush()
