"""Fences over everything that carries them.

A store looks up the name of whoever connects. A name service that loses a packet keeps it for
longer than the deadlines of these tests, and is no fault of theirs: it is not asked at all, here
and in every process that is started.
"""

import os

os.environ["RES_OPTIONS"] = "attempts:0"
