"""Seeded runs of a protocol in virtual time: what it costs, and what goes wrong when."""
