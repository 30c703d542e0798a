"""Texts: filler that needles hide in, streams of any size, and the embedded backbone's tokenizer."""
