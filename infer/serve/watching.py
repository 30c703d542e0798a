"""What the server tells those who watch it: `/metrics` for Prometheus, `/v1/memory`, `/healthz` for load balancers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from torch import nn

from locret.infer.serve.state import ServerState, state_of

router = APIRouter()


@router.get("/healthz", summary="Whether the server takes requests")
def health(request: Request) -> JSONResponse:
    """Return 200 with "ready", or 503: "draining" while the server ends, "stopped" where nothing writes answers."""
    state = state_of(request)
    status = "draining" if state.draining else "ready" if state.engine.running else "stopped"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/metrics", summary="Counters for Prometheus", response_class=Response)
def metrics(request: Request) -> Response:
    """Return what the server counts, in Prometheus' text format."""
    state, moment = state_of(request), CollectorRegistry()
    moment.register(_Moment(state))
    text = generate_latest(state.metrics.registry) + generate_latest(moment)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/memory", summary="The memory that was promised, and what is in use")
def memory(request: Request) -> dict[str, Any]:
    """Return the bytes planned and used of each part, and those of the whole process."""
    parts = {name: {"planned": planned, "used": used} for name, (planned, used) in _memory(state_of(request)).items()}
    return {"object": "memory", "parts": parts, "resident": psutil.Process().memory_info().rss}


def _memory(state: ServerState) -> dict[str, tuple[int, int]]:
    """Return bytes planned and used, part by part; what chunks and files work with is always set aside."""
    library, engine, plan = state.library, state.engine, state.library.plan
    parts = (part for part in (library.lm.model, library.lm.scorer) if isinstance(part, nn.Module))
    weights = sum(weight.nbytes for part in parts for weight in (*part.parameters(), *part.buffers()))
    aside = plan.working + plan.moving
    return {
        "weights": (weights, weights),
        "answers": (engine.planned_bytes, engine.used_bytes),
        "reading": (plan.reading, library.room.used),
        "loaded": (plan.loaded, library.prefixes.used),
        "working": (aside, aside),
    }


class _Moment(Collector):
    """What is true now, besides the counters of what has happened."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        answers, library = self._state.answers, self._state.library
        named, going = library.entries(), sum(entry.going for entry in library.entries())
        parts = _memory(self._state)
        yield GaugeMetricFamily("locret_queue_length", "Answers that wait for their first token", answers.waiting)
        yield GaugeMetricFamily("locret_running_answers", "Answers that are being written", answers.running)
        yield CounterMetricFamily("locret_read_tokens", "Tokens of texts that were read", library.turns.tokens)
        yield CounterMetricFamily("locret_read_chunks", "Chunks that were read", library.turns.chunks)
        automatic, loaded = len(library.automatic()), len(library.prefixes)
        where = {"disk": len(named) - going, "automatic": automatic, "reading": going, "loaded": loaded}
        planned, used = ({name: part[nth] for name, part in parts.items()} for nth in (0, 1))
        for name, about, label, values in (
            ("locret_contexts", "Contexts by where they are", "where", where),
            ("locret_planned_bytes", "Bytes promised at the start, by part", "part", planned),
            ("locret_used_bytes", "Bytes of the promise in use, by part", "part", used),
        ):
            family = GaugeMetricFamily(name, about, labels=[label])
            for one, value in values.items():
                family.add_metric([one], value)
            yield family
