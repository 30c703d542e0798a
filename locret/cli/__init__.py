"""The command line: options from dataclasses and recipes, help, refusals, and what a signal does."""
