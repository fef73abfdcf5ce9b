"""Faults for real. A store looks its peers up in reverse: a slow name service is not the fault
that is injected here, so its patience is short in every process that is started."""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
