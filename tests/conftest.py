"""Puts this folder on the import path: what several test files share lives here as plain modules."""
