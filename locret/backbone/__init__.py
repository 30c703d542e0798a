"""The backbone seen from outside: where its parts are, what a layer has just computed, how it attends and rotates."""
