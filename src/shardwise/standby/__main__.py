"""`python -m shardwise.standby --folder RUN MODULE WORDS...`: a module run on standby, or else as `python -m` would."""

import runpy
import sys
from pathlib import Path

from shardwise.standby.asker import run_on_standby

_, _, folder, module, *words = sys.argv
status = run_on_standby(Path(folder), module, words)
if status is not None:
    sys.exit(status)
sys.argv = [module, *words]
runpy.run_module(module, run_name="__main__", alter_sys=True)
