"""Start a world, print the process of its rank, and be killed.

python killed_parent.py
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from world import World

if __name__ == "__main__":
    print(*World(1).run(os.getpid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
