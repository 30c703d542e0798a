"""The options of `locret-serve` that no other command has."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from locret.base.fields import OptionClass, Range, check_ranges
from locret.cli.options import flag_of
from locret.conversation.protect import TEMPLATES
from locret.policy.planned_bytes import parse_bytes

KEY_VARIABLE = "LOCRET_API_KEY"
OPEN = "open"
"""The key that says that nobody needs one."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(OptionClass, usual=("contexts", "kv_memory", "host", "port", "api_key", "name", "dry_run")):
    """Where the server listens, and how much it takes."""

    contexts: str = "contexts"
    """Folder of the contexts; made if need be. One server at a time."""
    kv_memory: str = "2GiB"
    """Bytes for everything beside the weights: texts that are read, contexts, questions and answers."""
    readers: int = 2
    """Texts that are read side by side, in turns; more wait."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 takes requests of other machines, for which there has to be an --api-key."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    api_key: str | None = None
    """What clients must show as a bearer token. Others on this machine see a command line, so rather set the
    environment variable LOCRET_API_KEY. open: no key, also where other machines may ask."""
    name: str | None = None
    """Name of the model in requests; else --model."""
    template: str = "chat"
    """chat: the tokenizer's chat template; original: the one the original heads were trained on; none: plain text."""
    max_body: str = "4MiB"
    """Largest body of a request; longer texts are uploaded as contexts."""
    max_upload: str = "1GiB"
    """Longest text that is uploaded."""
    auto_contexts: str = "8GiB"
    """Disk that conversations and long prompts may take, which are read into contexts without a name; those used least
    recently go first."""
    max_queue: int = 256
    """Answers that may wait for their first token; further requests get 429."""
    max_new_tokens: int = 1024
    """Longest answer in tokens where a request does not say."""
    timeout: float = 600.0
    """Seconds that a request may take."""
    drain: float = 30.0
    """Seconds that answers have to end after Ctrl-C or SIGTERM."""
    dry_run: bool = False
    """Print how --kv-memory is divided, and leave."""
    json: bool = False
    """Print one JSON object when requests are taken, or the plan as one, instead of lines for people."""
    quiet: bool = False
    """No warnings or hints on standard error."""

    def __post_init__(self) -> None:
        least = {"readers": 1, "max_queue": 1, "max_new_tokens": 1, "timeout": 1e-3, "drain": 0}
        ranges = {name: Range(value) for name, value in least.items()}
        port = Range(0, (1 << 16) - 1, ", and 0 takes a free port")
        check_ranges(self, {"template": TEMPLATES, "port": port, **ranges})
        if not self.host:
            raise ValueError("--host is empty; give an address of this machine, such as 127.0.0.1")
        if self.api_key is not None:
            check_key("--api-key", self.api_key)

    @property
    def key(self) -> str | None:
        """What clients must show, from the option or the environment."""
        if self.api_key is not None:
            return None if self.api_key == OPEN else self.api_key
        if (key := os.environ.get(KEY_VARIABLE)) is not None:
            check_key(KEY_VARIABLE, key)
        return key

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host == "localhost" or ((own := _address(self.host)) is not None and own.is_loopback)

    def is_own_name(self, name: str) -> bool:
        """Return whether a Host header names this server; where other machines may ask, any address does."""
        if name in ("localhost", "127.0.0.1", "::1", self.host.lower()):
            return True
        return not self.local and (name == socket.gethostname().lower() or _address(name) is not None)

    def check(self) -> None:
        """Refuse to let others ask without a key, a key that no client can send, and what is no amount of bytes."""
        if self.key is None and self.api_key != OPEN and not self.local:
            raise ValueError(
                f"--host {self.host} lets other machines ask, and there is no key; set {KEY_VARIABLE} or --api-key, or "
                f"give --api-key {OPEN} to let everybody ask"
            )
        for name in ("max_body", "max_upload", "auto_contexts", "kv_memory"):
            self.bytes_of(name)

    def bytes_of(self, name: str) -> int:
        """Return the amount of bytes that an option names."""
        return parse_bytes(getattr(self, name), f"{flag_of(name)}: ")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def check_key(setting: str, key: str) -> None:
    """Refuse a key that no header can carry."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"{setting} is empty or has characters that no header carries; give letters, digits and punctuation"
        )
