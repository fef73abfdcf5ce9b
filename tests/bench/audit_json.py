"""Print the audit of one trace as JSON: the command that a scorer calls once per file."""

import sys
from pathlib import Path

from phasesync.audit import audit_trace
from phasesync.core.wire import encode
from phasesync.logs import lines

if __name__ == "__main__":
    path = Path(sys.argv[-1])
    sys.stdout.buffer.write(encode(audit_trace(str(path), lines(path)).to_json()) + b"\n")
