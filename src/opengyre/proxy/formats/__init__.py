"""How model families write a turn: reasoning, tool calls, its end. One file per kind, chosen by ``registry.choose``."""
