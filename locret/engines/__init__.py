"""Contexts in other engines: what was read here is an ordinary prefix there. One file per engine, each an extra."""
