"""From options to a backbone and its tokenizer; every failure is one sentence."""

from locret.base.plugins import on_demand

_NAMES = (
    *("device_of_source", "load_config", "load_model", "load_tokenizer"),
    *("resolve_device", "resolve_dtype", "tokenizer_of"),
)

__getattr__ = on_demand(__name__, dict.fromkeys(_NAMES, "locret.loading.backbone"))
