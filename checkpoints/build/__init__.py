"""Train the embedded backbone: a small Llama that can find facts in a text, from scratch.

    python -m checkpoints.build --config recipes/backbone/tiny.yaml

Finding a fact is induction: the answer repeats the fact's sentence, so each answer token attends to the token that
followed the same words in the text. Dense copying (a random sequence followed by a random rotation of itself, loss on
every copied token) teaches that in a few hundred steps; texts with hidden facts (loss on the answer alone) then teach
which words to follow, stage by stage over longer texts, a share of the batches staying dense. Random gaps in the
position ids show the model distances far beyond the length of a training sequence; in a share of the batches the first
layers see a short window only (`attention`).
"""
