"""Several processes that work on one run: who is who, how they end, and a frozen backbone that is spread over them."""
