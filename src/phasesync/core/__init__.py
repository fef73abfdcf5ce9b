"""What a protocol is and what may happen next: pure values and functions.

Nothing here knows seconds, files, sockets or torch. Checker, runtime and auditor
all ask the same kernel; none may have a second opinion.
"""
