"""transformers alone: every unit of the prompt is kept, and `generate` does everything. Run by worker.py."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

PACKAGES = ("transformers",)


def prepare(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the methods: functions of (ids, streamer) that return the units held in the end."""

    def read(ids: Any, streamer: Any, **options: Any) -> int:
        cache = DynamicCache()
        model.generate(
            ids, past_key_values=cache, max_new_tokens=job["new_tokens"], do_sample=False, streamer=streamer, **options
        )
        return int(cache.get_seq_length())

    return {"full": read, "full_chunked": lambda ids, to: read(ids, to, prefill_chunk_size=job["chunk_size"])}
