"""Faults for real."""
