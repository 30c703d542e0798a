"""`locret-serve`: an OpenAI-compatible server of contexts, in memory that is promised at the start."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base import interrupts
from locret.base.plugins import install
from locret.cli.command import parse_options, print_json, run, warnings_as_lines, with_flag
from locret.infer.infer_options import GenerationOptions, ModelOptions, PolicyOptions
from locret.infer.serve.serve_options import ServeOptions
from locret.loading.options import ScorerOptions
from locret.policy.resolve import PolicyFlags

if TYPE_CHECKING:
    from locret import LongContextModel
    from locret.infer.serve.plan import MemoryPlan
    from locret.infer.serve.state import ServerState

OPTION_CLASSES = (ModelOptions, ScorerOptions, PolicyFlags, ServeOptions)
DESCRIPTION = "Serve contexts and answers over HTTP, as OpenAI's clients ask, in memory that is promised at the start."
_LOOK = 0.1
"""Seconds between two looks at whether requests still run when the server is to end."""
_M_ARENA_MAX = -8
"""Of mallopt, as glibc's malloc.h has it."""


def command(argv: Sequence[str] | None = None) -> int:
    line = with_flag(list(sys.argv[1:] if argv is None else argv), "--model")
    (model, scorer, policy, options), chosen = parse_options("locret-serve", DESCRIPTION, OPTION_CLASSES, line)
    if lacking := [name for name in ("fastapi", "openai", "uvicorn") if find_spec(name) is None]:
        raise ValueError(f"the server needs {lacking[0]}; {install('serve')}")
    with warnings_as_lines("locret-serve", quiet=options.quiet), ExitStack() as ending:
        options.check()
        listening = None if options.dry_run else ending.enter_context(_listening(options))  # refused before loading
        if "MALLOC_ARENA_MAX" not in os.environ:  # else glibc keeps for each thread what that has freed, twice as much
            with suppress(OSError, TypeError, AttributeError):  # another C library
                ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        from locret.infer.reading import ready
        from locret.infer.serve.plan import MemoryPlan
        from locret.loading.weights import DISK

        numbers = {one.name: getattr(policy, one.name) for one in fields(policy)}
        backbone = ready(model, scorer, PolicyOptions(**numbers), chosen & numbers.keys(), GenerationOptions())
        weights = backbone.run.weights
        if weights.places.keys() <= {DISK}:
            raise ValueError(
                f"--device-map {model.device_map} leaves all weights on disk, where no engine answers; --device-map "
                "auto keeps what fits in memory"
            )
        lm = ending.enter_context(backbone.loaded(options.template))
        plan = MemoryPlan.of(lm, options.kv_memory, readers=options.readers)
        if listening is not None:
            _serve(_state(lm, options.name or model.model, plan, options, ending), listening, options)
        elif options.json:
            print_json({**asdict(plan), "weights": weights.to_dict()})
        else:
            beside = "; ".join(f"{count:,} bytes on {place}" for place, count in weights.places.items())
            print(f"{plan.table()}\nbeside it the weights: {beside}")
    return 0


def _listening(options: ServeOptions) -> socket.socket:
    where = options.host, options.port
    try:
        family, _, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        why = f"({getattr(error, 'strerror', None) or error}); choose an address of this machine, such as 127.0.0.1"
        raise ValueError(
            f"--port {options.port} at --host {options.host} cannot be had {why}, and another port, or 0 for a free one"
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: who does not read an answer for so long is cut off
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * options.timeout))
    return listening


def _state(lm: LongContextModel, name: str, plan: MemoryPlan, options: ServeOptions, ending: ExitStack) -> ServerState:
    """Return a server that is ready to answer; `ending` closes it."""
    from locret.engines.transformers import PagedContexts
    from locret.infer.serve.library import Library
    from locret.infer.serve.state import ServerState

    auto, upload = options.bytes_of("auto_contexts"), options.bytes_of("max_upload")
    library = Library(Path(options.contexts), lm, plan, auto_bytes=auto, max_upload=upload)
    ending.callback(library.close)
    engine = PagedContexts(lm.model, kv_bytes=plan.engine)
    engine.start()
    state = ServerState(engine=engine, library=library, model=name, options=options)
    ending.callback(state.close)
    return state


def _serve(state: ServerState, listening: socket.socket, options: ServeOptions) -> None:
    """Take requests until a signal comes, and let answers end."""
    import uvicorn

    from locret.infer.serve.app import Protocol, make_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _say(state, listening, options)

        def handle_exit(self, sig: int, frame: Any) -> None:
            state.draining = True
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # uvicorn stops listening first. Whoever asks while answers end is better told by a 503 than refused.
            until = time.monotonic() + options.drain
            while self.server_state.tasks and not self.force_exit and time.monotonic() < until:
                await asyncio.sleep(_LOOK)
            self.config.timeout_graceful_shutdown = max(1, round(until - time.monotonic()))
            await super().shutdown(sockets)

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR if options.quiet else logging.WARNING)
    quiet: Any = {"log_config": None, "access_log": False, "server_header": False}
    config = uvicorn.Config(make_app(state), http=Protocol, ws="none", lifespan="off", **quiet)
    with interrupts.unwinding():
        Server(config).run(sockets=[listening])


def _say(state: ServerState, listening: socket.socket, options: ServeOptions) -> None:
    """Tell where the server is; to be read by programs with --json."""
    (host, port), plan = listening.getsockname()[:2], state.library.plan
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    if options.json:
        print_json({"url": url, "model": state.model, "contexts": str(state.library.folder), **asdict(plan)})
        sys.stdout.flush()
    elif not options.quiet:
        sys.stderr.write(f"{plan.table()}\n{state.model} answers at {url}, and on the page {url.removesuffix('v1')}\n")


if __name__ == "__main__":
    run(command, prog="locret-serve")
