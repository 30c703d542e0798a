"""Tasks whose samples are made for a tokenizer, a length and a seed."""
